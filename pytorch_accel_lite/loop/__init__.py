"""The course of a run: how it begins or resumes, its epochs, steps and updates, evaluation and prediction."""
