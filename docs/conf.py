"""Sphinx configuration."""

project = "pytorch_accel_lite"
author = "The pytorch_accel_lite authors"
copyright = "2026, the pytorch_accel_lite authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "pytorch_accel_lite"
exclude_patterns = ["_build", "results"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
