"""The kinds of training steps that replace the plain step, or parts of it."""
