"""The choice between kinds of training steps, their conflicts, the plain step, and clipping."""
