"""Modules: their modes, their wrappers, and weights that are sharded or quantised."""
