"""Checks and explanations of mistakes: in arguments, callbacks, subclasses and failed steps.

Nothing here is needed to understand training, and nothing is called in a successful step.
"""
