"""Measuring how the time of a run is spent."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.modules_and_devices import is_asynchronous
from pytorch_accel_lite.extension_tools.texts_and_pages import align
from pytorch_accel_lite.extensions.profiling.device_timer import DeviceTimer, Moment

_PHASES = ("data", "forward", "backward", "optimizer", "evaluation", "saving")


class TimingCallback(TrainerCallback):
    """Measure how the time of each epoch and of the run is spent, and print a table at the end of the run.

    The phases are: waiting for data (on average, and on the process that waited most), forward pass, backward pass,
    optimizer (including averaging over an accumulation window, clipping and the schedule), evaluation, saving (the time
    that the run waits for checkpoints, weights and training states), each class of callbacks, without its evaluations
    and saving, and the remaining time. On a GPU, forward, backward and optimizer are measured with device events that
    are read later, so nothing waits for the device.

    Recorded per epoch in seconds: ``time_data``, ``time_data_max``, ``time_forward``, ``time_backward``,
    ``time_optimizer``, ``time_evaluation``, ``time_saving``, ``time_callbacks`` and ``time_epoch``. Saving at the very
    end of an epoch counts towards the next epoch. Each event costs a few microseconds.

    Args:
        show: print the table

    Attributes:
        totals: seconds per phase, of the entire ``"run"``, and of each callback by class name
    """

    affects_training = False

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self.totals: dict[str, float] = {}
        self._is_running = False
        self._clear()

    def _clear(self) -> None:
        self._phases: dict[str, float] = defaultdict(float)
        self._callbacks: dict[str, float] = defaultdict(float)
        #: All seconds counted so far, so that nested times are not counted twice.
        self._counted = 0.0
        self._device_mark: Moment | None = None
        self._mark = self._mark_counted = self._epoch_start = 0.0
        self._callbacks_before = 0.0

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        if sum(isinstance(callback, TimingCallback) for callback in trainer.callback_handler) > 1:
            raise ValueError("callbacks holds more than one TimingCallback. One measures all: leave the others out.")
        request.metrics.record(self, [f"time_{name}" for name in (*_PHASES, "data_max", "callbacks", "epoch")])

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._clear()
        self.totals = dict.fromkeys((*_PHASES, "data_max", "run"), 0.0)
        self._is_running = True
        self._timer = DeviceTimer(trainer.device) if is_asynchronous(trainer.device) else None
        self._epoch_start = time.perf_counter()
        trainer.callback_handler.timer = self._time

    @contextmanager
    def _time(self, part: object) -> Iterator[None]:
        """Count the time of a callback or a named phase, without the times within it that are counted separately."""
        start = time.perf_counter()
        counted = self._counted
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            if part is not self:  # this callback's own laps count the time before the event
                seconds -= self._counted - counted
            if isinstance(part, str):
                self._phases[part] += seconds
            else:
                self._callbacks[type(part).__name__] += seconds
            self._counted += seconds
            if part == "evaluation":
                self._lap(None)  # what led to it is no waiting for data

    def _lap(self, phase: str | None) -> None:
        """Add the uncounted time since the last mark to a phase, and reset the mark."""
        now = time.perf_counter()
        if phase is not None:
            seconds = max(now - self._mark - (self._counted - self._mark_counted), 0.0)
            self._phases[phase] += seconds
            self._counted += seconds
        self._mark = now
        self._mark_counted = self._counted

    def _lap_of_device(self, phase: str) -> None:
        if self._timer is None:
            self._lap(phase)
            return
        now = self._timer.now()
        self._timer.add(phase, self._device_mark, now)
        self._device_mark = now
        self._lap(None)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._lap(None)

    def on_train_step_end(self, trainer: TrainerLike, *args: object, **kwargs: object) -> None:
        self._lap(None)

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._lap("data")
        if self._timer is not None:
            self._device_mark = self._timer.now()

    def on_backward_start(self, trainer: TrainerLike, *args: object, **kwargs: object) -> None:
        self._lap_of_device("forward")

    def on_backward_end(self, trainer: TrainerLike, *args: object, **kwargs: object) -> None:
        self._lap_of_device("backward")

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._lap_of_device("optimizer")

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        for name, seconds in self._count(trainer).items():
            trainer.run_history.update_metric(f"time_{name}", seconds)

    def _count(self, trainer: TrainerLike) -> dict[str, float]:
        """Return the means over all processes since the last call, and add them to the totals."""
        if self._timer is not None:
            for phase, seconds in self._timer.take().items():  # without waiting: the losses have already been read
                self._phases[phase] += seconds
        now = time.perf_counter()
        callbacks = sum(self._callbacks.values())
        local = [self._phases[phase] for phase in _PHASES]
        local += [callbacks - self._callbacks_before, now - self._epoch_start]
        *phases, in_callbacks, epoch = (value / trainer.ranks.world_size for value in trainer.ranks.sum(local))
        (longest_wait,) = trainer.ranks.max(local[:1])
        measured = dict(zip(_PHASES, phases, strict=True)) | {"data_max": longest_wait}
        for name, seconds in (measured | {"run": epoch}).items():
            self.totals[name] += seconds
        self._callbacks_before = callbacks
        self._epoch_start = now
        self._phases.clear()
        return measured | {"callbacks": in_callbacks, "epoch": epoch}

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not self._is_running:  # an error ended the run before it began
            return
        self._is_running = False
        self._count(trainer)
        trainer.callback_handler.timer = None
        by_rank = trainer.ranks.all_gather_object(dict(self._callbacks))
        for name in set().union(*by_rank):
            self._callbacks[name] = statistics.fmean(of_rank.get(name, 0.0) for of_rank in by_rank)
        self.totals |= self._callbacks
        if self.show:
            trainer.print(self)

    def on_exception(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.callback_handler.timer = None

    def __str__(self) -> str:
        """Return a table of how the time was spent."""
        whole = self.totals["run"]
        waiting = f"data (most on one process: {self.totals['data_max']:.2f} s)"
        rows = [(waiting if phase == "data" else phase, self.totals[phase]) for phase in _PHASES]
        by_time = sorted(self._callbacks.items(), key=lambda item: item[1], reverse=True)
        rows += [(name, seconds) for name, seconds in by_time if seconds >= 0.001 * whole]
        rows.append(("other", max(whole - sum(seconds for _, seconds in rows), 0.0)))
        cells = [(name, f"{seconds:.2f} s", f"{seconds / whole:.1%}") for name, seconds in rows]
        return "\n".join(["Where the time went:", *align([*cells, ("the whole run", f"{whole:.2f} s", "")], 1)])
