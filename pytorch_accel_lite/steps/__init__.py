"""The kinds of training steps that replace the plain one, or parts of it."""
