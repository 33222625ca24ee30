"""A run's step is constructed on each process alone; then all processes start with the same values."""

from __future__ import annotations

from typing import Any

import pytest

from pytorch_accel_lite.steps import step_choice
from pytorch_accel_lite.steps.plain_step import PlainStep
from tests.small_models import make_trainer, train


def calls_of_a_step() -> list[str]:
    """What is called of a step that needs its own attributes from the start."""

    class Recorded(PlainStep):
        def __init__(self, trainer: Any, run: Any) -> None:
            super().__init__(trainer, run)
            self.calls: list[str] = []

        def begin_replicas(self, trainer: Any, run: Any) -> None:
            self.calls.append("begin_replicas")
            super().begin_replicas(trainer, run)

        def begin(self, trainer: Any, run: Any) -> None:
            self.calls.append("begin")
            super().begin(trainer, run)

        def forward_backward(self, trainer: Any, run: Any, batch: Any) -> Any:
            self.calls.append("forward_backward")
            return super().forward_backward(trainer, run, batch)

        def end(self, trainer: Any, run: Any) -> None:
            self.calls.append("end")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_choice, "PlainStep", Recorded)
        step: Any = train(make_trainer(), batch_size=6).current_run.training_step
    calls: list[str] = step.calls
    return calls


IN_ORDER = ["begin_replicas", "begin", "forward_backward", "end"]


def test_a_step_begins_once_it_is_constructed():
    assert calls_of_a_step() == IN_ORDER


@pytest.mark.processes
def test_a_step_of_several_processes_begins_once_constructed(two_ranks):
    assert two_ranks(calls_of_a_step) == [IN_ORDER] * 2
