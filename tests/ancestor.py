"""pytorch-accelerated (the ancestor), with which some tests compare."""

from __future__ import annotations

import importlib.util

import pytest


def skip_without_it() -> None:
    """Skip the test if pytorch-accelerated is not installed, as with the oldest versions: it needs accelerate 1.12."""
    if importlib.util.find_spec("pytorch_accelerated") is None:
        pytest.skip("pytorch-accelerated is not installed, which needs accelerate 1.12")
