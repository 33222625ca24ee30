"""The base class of loggers that write a row of numbers every n updates, averaged without blocking any step."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch

from pytorch_accel_lite.extending import LossTracker, NonFiniteLossError, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int, optional
from pytorch_accel_lite.extension_tools.data_and_batches import is_number
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Interval, MetricValue, parse_interval
from pytorch_accel_lite.extension_tools.modules_and_devices import AsyncCopy, accumulation_dtype
from pytorch_accel_lite.extension_tools.plain_types import StateDict

# Number of rows kept pending while their numbers are copied from a device.
_ROWS_BEHIND = 4
# Number of queued jobs beyond which the run waits: a tracker that does not respond must not fill the memory.
_MAX_JOBS = 1000
# Seconds that a failing process allows for pending writes while its peers wait for it to exit.
_TIMEOUT = 5.0
# Columns of every row. Step metrics cannot use these names.
_COLUMNS = ("update", "epoch", "loss")


class BackgroundWorker:
    """A thread that runs jobs in order. Jobs must not communicate with other processes."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_JOBS)
        self._failure: BaseException | None = None
        # A daemon thread, so that a failing process can exit without waiting for it.
        threading.Thread(target=self._run, daemon=True, name="logger").start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                job()
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._jobs.task_done()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after all earlier ones.

        Raises:
            BaseException: the error of an earlier job that failed
        """
        self._raise_failure()
        self._jobs.put(job)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all jobs are done.

        Args:
            seconds: timeout

        Raises:
            BaseException: the error of a job that failed
        """
        with self._jobs.all_tasks_done:
            self._jobs.all_tasks_done.wait_for(lambda: not self._jobs.unfinished_tasks, seconds)
        self._raise_failure()

    def close(self) -> None:
        """End the thread once all jobs are done, without waiting for it."""
        with suppress(queue.Full):  # the queue is full if a tracker does not respond
            self._jobs.put_nowait(None)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class _Row(NamedTuple):
    update: int
    epoch: int
    names: list[str]  # names of the step metrics
    # Sums of losses and weights, then metrics, of this process; None for numbers in ``copied``.
    numbers: list[float | None]
    copied: AsyncCopy | None
    tracker: LossTracker


class StepLogger(TrainerCallback, ABC):
    """Base class of callbacks that log every n updates: the mean loss since the last row, and ``trainer.step_metrics``.

    A row is created at the end of a step, before any training state is saved. Numbers on a device are copied while it
    computes, and averaged over all processes a few rows later; rows are written in the background. ``state_dict()``
    waits for all of this, so that every state has its rows and no row is lost or written twice.

    Args:
        every_n_updates: number of updates between rows; ``None`` logs no rows
        every: instead, an ``Interval`` between rows, such as ``"10_000 samples"``
    """

    affects_training = False

    def __init__(self, every_n_updates: int | None = None, every: str | Interval | None = None) -> None:
        self.every_n_updates = optional(check_positive_int, "every_n_updates", every_n_updates)
        self.every = optional(parse_interval, "every", every)
        self._argument = "" if every is None else "every"
        if self.every is None and every_n_updates is not None:
            self.every = Interval(every_n_updates, "updates")
        self._trainer: TrainerLike | None = None
        self._loaded_latest: list[dict[str, float]] = []
        self._pending: deque[_Row] = deque()
        self._background: BackgroundWorker | None = None
        #: An epoch, and its sums of losses and weights at the last row, which are subtracted for the mean of the next
        #: row. The sums are negative if the last row was in an earlier epoch: the remainder of that epoch is then
        #: added.
        self._sums = (0, 0.0, 0.0)

    @abstractmethod
    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        """Write a row. Called on the first process only, in order, in the background.

        Args:
            update: number of updates made
            epoch: number of the epoch, from 1
            values: the mean ``loss`` since the last row, and the step metrics, each averaged over the processes that
                have it
        """

    def in_background(self, job: Callable[[], None]) -> None:
        """Run a job in the background, after the rows so far."""
        if self._background is None:
            self._background = BackgroundWorker()
        self._background.submit(job)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._trainer = trainer
        self._background = None
        self._pending.clear()
        self._sums = (0, 0.0, 0.0)
        if self.every is not None:
            self.every.start(trainer.run, self._argument)

    def on_update_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._begin_row_if_due(trainer):
            self._average(keep=0 if trainer.device.type == "cpu" else _ROWS_BEHIND - 1)

    def _begin_row_if_due(self, trainer: TrainerLike, ends_epoch: bool = False) -> bool:
        if self.every is None or not self.every.is_due(trainer.run, ends_epoch=ends_epoch):
            return False
        self.every.advance(trainer.run, ends_epoch=ends_epoch)
        self._pending.append(self._begin_row(trainer))
        return True

    def _begin_row(self, trainer: TrainerLike) -> _Row:
        """Begin a row, copying numbers on a device to host memory asynchronously."""
        tracker = trainer.run.loss_trackers["loss"]
        metrics = sorted(trainer.step_metrics.items())
        values = [("", tracker.total_loss), ("", tracker.running_count), *metrics]
        numbers = [_number(name, value) for name, value in values]
        on_device = [value for (_, value), number in zip(values, numbers, strict=True) if number is None]
        copied = None
        if on_device:
            dtype = accumulation_dtype(trainer.device)
            copied = AsyncCopy(torch.stack([value.detach().to(dtype).reshape(()) for value in on_device]))
        progress = trainer.progress
        return _Row(progress.update, progress.epoch, [name for name, _ in metrics], numbers, copied, tracker)

    def _average(self, keep: int) -> None:
        """Average and write pending rows, except the latest ``keep``."""
        while len(self._pending) > keep:
            row = self._pending.popleft()
            self._finish_row(row, *self._averaged(row))

    def _averaged(self, row: _Row) -> tuple[float, float, dict[str, float]]:
        """Return the sums of losses and weights over all processes, and the means of the step metrics.

        The mean of a step metric is over the processes that have logged it.
        """
        assert self._trainer is not None
        ranks = self._trainer.ranks
        # Unless all rows are flushed, the copy has long since arrived.
        copied = iter([] if row.copied is None else row.copied.read().tolist())
        local = [next(copied) if number is None else number for number in row.numbers]

        def gather() -> list[tuple[list[str], list[float]]]:
            if row.copied is None:  # not copied: this process may have the numbers of others, too
                local[:2] = float(row.tracker.total_loss), float(row.tracker.running_count)
            return ranks.all_gather_object((row.names, local))

        total = count = 0.0
        by_name: dict[str, list[float]] = {}
        for names, (rank_total, rank_count, *values) in ranks.repeat_if_process_lost(gather):
            total += rank_total
            count += rank_count
            for name, value in zip(names, values, strict=True):
                by_name.setdefault(name, []).append(value)
        return total, count, {name: sum(values) / len(values) for name, values in sorted(by_name.items())}

    def _sums_before(self, epoch: int) -> tuple[float, float]:
        """Return the sums to subtract for the mean of the next row in an epoch."""
        summed_epoch, total, count = self._sums
        return (total, count) if summed_epoch == epoch else (0.0, 0.0)

    def _finish_row(self, row: _Row, total: float, count: float, values: dict[str, float]) -> None:
        total_before, count_before = self._sums_before(row.epoch)
        self._sums = row.epoch, total, count
        if count > count_before:
            values = {"loss": (total - total_before) / (count - count_before), **values}
        if self._trainer is not None and self._trainer.ranks.rank == 0:
            self.in_background(lambda: self.write_row(row.update, row.epoch, values))

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._begin_row_if_due(trainer, ends_epoch=True)
        self._average(keep=0)
        if self.every is not None:
            row = self._begin_row(trainer)
            total_before, count_before = self._sums_before(row.epoch)
            total, count, _ = self._averaged(row)
            self._sums = row.epoch + 1, total_before - total, count_before - count

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._average(keep=0)
        self._end_background()

    def on_exception(self, trainer: TrainerLike, *, exception: BaseException, **kwargs: object) -> None:
        if trainer.ranks.world_size == 1 or isinstance(exception, NonFiniteLossError):
            self._average(keep=0)
            self._end_background()
        else:  # other processes may be gone, so pending rows are not averaged
            self._end_background(_TIMEOUT)

    def _end_background(self, seconds: float | None = None) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.close()
            background.wait(seconds)

    def state_dict(self) -> StateDict:
        """Wait for all rows, and return what the next row needs. Must be called on every process.

        Raises:
            RuntimeError: if a row could not be written, because no training state may be saved without it
        """
        self._average(keep=0)
        if self._background is not None:
            try:
                self._background.wait()
            except OSError as error:
                raise RuntimeError(f"{type(self).__name__} could not write its rows: {error}") from error
        return {"sums": list(self._sums), "latest_by_rank": self._latest_by_rank()}

    def _latest_by_rank(self) -> list[dict[str, float]]:
        """Return the step metrics of all processes: some may not be measured again before the next row."""
        trainer = self._trainer
        if trainer is None:
            return self._loaded_latest
        if self.every is None or trainer.division.has_fixed_shares:
            return []
        local = {name: float(value) for name, value in trainer.step_metrics.items() if is_number(value)}
        gathered: list[dict[str, float]] = trainer.ranks.all_gather_object(local)
        return gathered

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        epoch, total, count = state["sums"]
        self._sums = (int(epoch), total, count)
        self._loaded_latest = latest = state.get("latest_by_rank", [])  # absent from older states
        trainer = self._trainer
        if trainer is not None and len(latest) == trainer.ranks.world_size:
            trainer.step_metrics.update(latest[trainer.ranks.rank])


def _number(name: str, value: MetricValue) -> float | None:
    """Return the value of a step metric, or ``None`` if it is on a device and must not be read yet."""
    if name in _COLUMNS:
        raise ValueError(
            f"trainer.step_metrics[{name!r}] uses a reserved name; every row has the columns {', '.join(_COLUMNS)}. "
            "Choose another name."
        )
    try:
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            value.reshape(())
            return None
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"trainer.step_metrics[{name!r}]={value!r} must be a number, or a tensor with one element."
        ) from None
