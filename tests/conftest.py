"""Fixtures: runs of several processes, started once and looked at by many tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests import launching


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@functools.cache
def _run(processes: int) -> launching.Results:
    return launching.run_cases(processes)


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Any:
    """What every case of tests/scripts/cases.py gave on each of 2 and 3 processes."""
    return _run(request.param)


@pytest.fixture
def two_ranks() -> Any:
    """The same on 2 processes only."""
    return _run(2)
