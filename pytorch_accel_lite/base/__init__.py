"""Helpers that know nothing of training: devices, modules, generators, checks of arguments, paths, texts."""
