"""Helpers of all layers, which know nothing of training: see the folders."""
