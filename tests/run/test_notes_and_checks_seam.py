"""The seam for notes on the errors of a run."""

from __future__ import annotations

from typing import Any

import pytest

from pytorch_accel_lite.extending import ERROR_NOTES
from tests.small_models import listener, make_data, make_model, make_trainer, train


@pytest.fixture
def noted_errors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Error, place and phase of what a function that notes them is called with, after one that fails."""
    calls: list[Any] = []

    def fail(error, trainer, run, phase):
        raise RuntimeError("This must not hide the error itself.")

    def note(error, trainer, run, phase):
        assert run is trainer.run
        calls.append((type(error), run.progress.epoch, run.batch_number, phase))

    monkeypatch.setattr("pytorch_accel_lite.run.notes_and_checks_seam.ERROR_NOTES", [*ERROR_NOTES, fail, note])
    return calls


def fails(trainer: Any, **kwargs: Any) -> None:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("event", "calls"),
    [
        ("on_training_run_start", [(0, None, "training")]),
        ("on_update_end", [(1, 0, "training")] * 2),
        ("on_eval_step_end", [(1, 0, "evaluation"), (1, 0, "training")]),
    ],
)
def test_notes_on_an_error_are_asked_for_from_the_inside_out(noted_errors, event, calls):
    with pytest.raises(KeyError, match="mine"):
        train(make_trainer([listener(**{event: fails})]), eval_dataset=True)
    assert noted_errors == [(KeyError, *call) for call in calls]


@pytest.mark.parametrize(("method", "phase"), [("evaluate", "evaluation"), ("predict", "prediction")])
def test_notes_are_asked_for_without_training_too(noted_errors, method, phase):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        getattr(make_trainer(model=make_model(features=5)), method)(make_data(), per_device_batch_size=2)
    assert set(noted_errors) == {(RuntimeError, 0, 0, phase)}


def test_an_interrupt_is_not_noted(noted_errors):
    def interrupts(trainer: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make_trainer([listener(on_update_end=interrupts)]))
    assert not noted_errors
