"""What answers mistakes: before a run, when a callback is added, a subclass made, an argument unknown, a step failed.

Nothing here is needed to understand training, and nothing is called in a step that goes well.
"""
