"""The state of a run: its settings, progress, events, losses, history and parts."""
