"""What a run is: its settings, progress, events, losses and history, and the state of the run itself."""
