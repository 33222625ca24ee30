"""The choice between kinds of training steps, their conflicts, and the step of sharded weights."""
