"""The metrics of a run: running losses, the history, names and directions, and which one is watched."""
