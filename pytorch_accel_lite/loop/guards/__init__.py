"""Checks for mistakes before, during and after a run, with advice. Nothing here trains."""
