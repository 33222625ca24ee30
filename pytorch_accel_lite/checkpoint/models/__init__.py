"""Weights of models and the states of other trained objects, and the forms in which models are saved."""
