"""How a run ends: by its last update, a stop that all processes agree on, a signal or an error."""
