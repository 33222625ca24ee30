"""Runs that many tests look at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.repository.feature_comparison.noted_runs import run_noted
from tests.small_models import make_data


@pytest.fixture(scope="module")
def trainer() -> Any:
    """The trainer of a run of two epochs of three batches, which accumulates two, with an evaluation and a schedule."""
    return run_noted()


@pytest.fixture(scope="module")
def evaluated_run() -> Any:
    """Such a run, evaluated afterwards: its trainer, the calls, the settings before the evaluation, and its metrics."""
    trainer = run_noted()
    config, calls = trainer.run_config, len(trainer.calls)
    metrics = trainer.evaluate(make_data(), 2)
    return SimpleNamespace(trainer=trainer, calls=trainer.calls[calls:], config=config, metrics=metrics)
