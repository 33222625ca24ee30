"""The choice between kinds of training steps, their conflicts, and the plain step."""
