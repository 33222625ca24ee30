"""A run: what it is asked for, how it begins or resumes, its epochs, steps and updates, evaluation and prediction."""
