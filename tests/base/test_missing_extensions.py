"""What belongs to an extension names it where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.extending import DIVISIONS, INFERENCE_STEP, PLOTS, STEP_COMPILER
from tests.small_models import make_data, make_trainer, train


def test_an_argument_of_an_extension_that_is_not_there_names_it(monkeypatch):
    for name in [*DIVISIONS]:
        monkeypatch.delitem(DIVISIONS, name)
    with pytest.raises(ValueError, match="logical_processes=2 belongs to the extension 'logical', which is not"):
        make_trainer(logical_processes=2, seed=0)


def test_a_plot_without_its_extension_names_it(monkeypatch):
    monkeypatch.setattr(PLOTS, "content", None)
    with pytest.raises(ImportError, match=r"RunHistory.plot belongs to the extension 'plots', which is not installed"):
        make_trainer().run_history.plot()


def test_a_slot_is_filled_by_one_extension_only():
    slot = Slot[str]("plots")
    slot.fill("ours")
    with pytest.raises(RuntimeError, match="The extension 'plots' has filled this slot already, with 'ours'"):
        slot.fill("another's")
    assert slot.get("plot") == "ours"


def test_compile_step_without_its_extension_names_it(monkeypatch):
    monkeypatch.setattr(STEP_COMPILER, "content", None)
    with pytest.raises(ValueError, match="compile_step=True belongs to the extension 'compiled_step', which is not"):
        make_trainer(compile_step=True)


class Skips(TrainerCallback):
    """Requests that failing batches are skipped."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def configure_run(self, trainer: Trainer, request: Any, **kwargs: Any) -> None:
        setattr(request, self.phase, True)


def test_failed_batches_without_their_extension_name_it(monkeypatch):
    monkeypatch.setattr(INFERENCE_STEP, "content", None)
    calls: list[tuple[str, Any]] = [
        ("skips_failed_batches", train),
        ("skips_in_evaluation", lambda trainer, **kwargs: trainer.evaluate(make_data(), **kwargs)),
        ("skips_in_prediction", lambda trainer: trainer.predict(make_data())),
    ]
    for phase, call in calls:
        with pytest.raises(ValueError, match="Skipping batches that fail belongs to the extension 'failed_batches'"):
            call(make_trainer([Skips(phase)]))
    for _, call in calls[:2]:
        with pytest.raises(ValueError, match="auto_microbatch=True belongs to the extension 'failed_batches', which"):
            call(make_trainer(), auto_microbatch=True)
