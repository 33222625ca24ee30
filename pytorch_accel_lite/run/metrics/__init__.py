"""The metrics of a run: running losses, the history, names, directions and panels, and which one is watched."""
