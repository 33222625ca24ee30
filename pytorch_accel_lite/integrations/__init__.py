"""Schedulers and clusters that runs take part in: one file for each, imported when it is named."""
