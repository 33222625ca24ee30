"""The training, evaluation and prediction loops."""
