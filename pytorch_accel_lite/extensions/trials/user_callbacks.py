"""Calling a user's own callbacks outside a run, until they fail."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pytorch_accel_lite.callbacks import CallbackHandler, StopTrainingError, TrainerCallback
from pytorch_accel_lite.extension_tools.arguments_and_errors import describe_error, is_overridden
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import EVENTS, events_between

#: The events of a step, except the event for saving.
_OF_A_STEP = events_between("on_train_epoch_start", "on_train_step_checkpoint")


class UserCallbacks(CallbackHandler):
    """Calls the methods that the user wrote for the events of a step. A callback is called until it raises an error.

    A callback may fail because it relies on an event that was not fired.

    Args:
        callbacks: the trainer's callbacks, of which only those with methods for the events of a step are called
        now: returns the time in seconds

    Attributes:
        seconds: how long each callback took, by class
        failures: the errors that callbacks raised, by class
        timer: returns a context that times a callback and catches its error
    """

    def __init__(self, callbacks: Iterable[TrainerCallback], now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self.failures: dict[str, str] = {}
        self.timer = self._timed_until_it_fails
        self._now = now
        for callback in callbacks:
            overridden = [event for event in _OF_A_STEP if is_overridden(callback, event)]
            if overridden:
                self.callbacks.append(callback)
                self.set_listening(callback, False, *(event for event in EVENTS if event not in overridden))
        self._tried = list(self.callbacks)

    @contextmanager
    def _timed_until_it_fails(self, callback: object) -> Iterator[None]:
        if callback not in self._tried:  # the part is a phase within a callback, such as saving
            yield
            return
        name, begin = type(callback).__name__, self._now()
        try:
            yield
        except StopTrainingError:
            pass
        except Exception as error:
            self.failures[name] = describe_error(error)
            self.set_listening(callback, False, *_OF_A_STEP)
        self.seconds[name] += self._now() - begin
