"""Callbacks that record the events of a run, or raise an error in one."""

from __future__ import annotations

from typing import Any

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.run.events import EVENTS
from tests.small_models import listener

BEFORE_RUNS = ("on_init", "on_dataloaders", "on_evaluation", "on_predict")
NOT_IN_EVERY_RUN = ("on_train_batch_skipped", "on_eval_batch_skipped", "on_processes_changed")  # tested elsewhere
RUN_EVENTS = [name for name in EVENTS if not name.startswith(BEFORE_RUNS) and name not in NOT_IN_EVERY_RUN]
ENDINGS = ("on_stop_training_error", "on_exception", "on_training_run_end")
DURING_TRAINING = [name for name in RUN_EVENTS if name not in ENDINGS]


def recording_callback() -> TrainerCallback:
    """A callback that defines every event, and keeps the event's name with its keyword arguments in ``calls``."""

    def make(event: str) -> Any:
        def method(self: Any, trainer: Trainer, **kwargs: Any) -> None:
            self.calls.append((event, kwargs))

        return method

    callback = type("Recorder", (TrainerCallback,), {event: make(event) for event in EVENTS})()
    callback.calls = []
    return callback


def fired(callback: Any) -> list[str]:
    """The recorded events; keyword arguments that are numbers or flags are shown, those of batches only named."""
    shown = []
    for event, kwargs in callback.calls:
        values = [f"{k}={v}" if isinstance(v, (int, bool)) else k for k, v in sorted(kwargs.items())]
        shown.append(f"{event}({', '.join(values)})" if values else event)
    return shown


def after(recorder: Any, event: str) -> list[str]:
    """The events after the first occurrence of one."""
    names = [name for name, _ in recorder.calls]
    return names[names.index(event) + 1 :]


def raising(event: str, error: BaseException) -> TrainerCallback:
    """A callback that raises once, at the first occurrence of an event."""
    pending = [error]

    def method(trainer: Trainer, **kwargs: Any) -> None:
        if pending:
            raise pending.pop()

    return listener(**{event: method})


class CustomError(Exception):
    """An error that nothing else raises."""
