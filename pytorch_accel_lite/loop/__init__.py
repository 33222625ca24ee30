"""A run: its settings, how it begins or resumes, its epochs, steps and updates, evaluation and prediction."""
