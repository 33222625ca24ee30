"""Measuring how long the user's callbacks take in a training step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytorch_accel_lite.base.events import EVENTS, CallbackHandler, StopTrainingError, TrainerCallback
from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.engine.history import InMemoryRunHistory
from pytorch_accel_lite.engine.losses import create_trackers
from pytorch_accel_lite.engine.restoring import preserving_attributes, replaced
from pytorch_accel_lite.engine.training import train_step

if TYPE_CHECKING:
    from pytorch_accel_lite.data import Batch
    from pytorch_accel_lite.engine.run import Run

_OF_A_STEP = (
    "on_train_step_start",
    "on_backward_start",
    "on_backward_end",
    "on_optimizer_step_start",
    "on_optimizer_step_end",
    "on_train_step_end",
    "on_update_end",
)


class CallbackTimes:
    """Measures callbacks in steps outside a run: only the methods that the user wrote, for the events of a step.

    A callback that fails, because it needs an event before, is not called again.

    :param now: returns the time, once the device is idle
    :ivar seconds: seconds per step, by class name
    """

    def __init__(self, callbacks: Iterable[TrainerCallback], now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._failed: dict[str, str] = {}
        self._now = now
        self._totals: dict[str, float] = defaultdict(float)
        self._handler = CallbackHandler()
        self._handler.timer = self._time
        for callback in callbacks:
            own = [event for event in _OF_A_STEP if is_overridden(callback, event)]
            if own:
                self._handler.callbacks.append(callback)
                self._handler.set_listening(callback, False, *(event for event in EVENTS if event not in own))

    def measure(self, trainer: TrainerLike, run: Run, batches: Sequence[Batch]) -> None:
        """Train on batches. What the callbacks change of themselves, the trainer and its history is restored."""
        if not self._handler.callbacks:
            return
        with (
            preserving_attributes(trainer, *self._handler.callbacks),
            replaced(trainer, callback_handler=self._handler, run_history=InMemoryRunHistory()),
        ):
            run.loss_trackers = create_trackers(trainer)
            run.progress.start_epoch()
            for batch in batches:
                train_step(trainer, run, batch)
        self.seconds = {name: total / len(batches) for name, total in self._totals.items() if name not in self._failed}

    def describe_unmeasured(self) -> Iterator[str]:
        """Yield a sentence if some callbacks could not be measured."""
        reasons = {name: self._failed.get(name, "several processes") for name in self._handler.callback_list}
        unmeasured = [f"{name} ({reason})" for name, reason in reasons.items() if name not in self.seconds]
        if unmeasured:
            listed = ", ".join(unmeasured)
            yield f"Callbacks that could not be measured: {listed}. A run with TimingCallback measures them."

    @contextmanager
    def _time(self, callback: object) -> Iterator[None]:
        if isinstance(callback, str):  # a phase within a callback, such as saving
            yield
            return
        name = type(callback).__name__
        begin = self._now()
        try:
            yield
        except StopTrainingError:
            pass
        except Exception as error:
            self._failed[name] = f"{type(error).__name__}: {error}"
            self._handler.set_listening(callback, False, *_OF_A_STEP)  # type: ignore[arg-type]
        self._totals[name] += self._now() - begin
