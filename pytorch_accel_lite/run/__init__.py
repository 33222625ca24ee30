"""The state of a run: its settings, progress, events and parts; its metrics, in a folder."""
