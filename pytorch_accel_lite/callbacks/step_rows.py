"""What loggers have in common: a row of numbers every n updates, means over all processes, which no step waits for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.events import TrainerCallback
from pytorch_accel_lite.utils import check_positive_int

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


# So many jobs may be waiting before the run waits for them: a tracker that does not answer must not fill the memory.
_JOBS_BEHIND = 1000


class InBackground:
    """Does one job after the other, in a thread of its own."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_JOBS_BEHIND)
        self._failure: Exception | None = None
        # A daemon: a process that fails does not wait for what no longer comes.
        threading.Thread(target=self._run, daemon=True, name="logger").start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                if self._failure is None:
                    job()
            except Exception as error:
                self._failure = error
            finally:
                self._jobs.task_done()

    def do(self, job: Callable[[], None]) -> None:
        """Do this when all that was given before is done.

        :raises Exception: what an earlier job failed with
        """
        self._raise_failure()
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all is done.

        :raises Exception: what a job failed with
        """
        self._jobs.join()
        self._raise_failure()

    def close(self) -> None:
        """End the thread, when all is done. It is not waited for."""
        self._jobs.put(None)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class _Row(NamedTuple):
    update: int
    epoch: int
    names: list[str]
    values: torch.Tensor
    arrived: torch.cuda.Event | None


class StepRows(TrainerCallback):
    """Base class of callbacks that log every n updates: the mean loss since the last row, and ``trainer.step_metrics``.

    A row is made at the end of the step, before any training state is saved. All else is done in the background, where
    it keeps no step waiting: the numbers come from the device, are averaged over the processes, and are written. When
    the callback's state is taken, all of that is waited for: so every state has its rows, and no row is lost or written
    twice.

    :param every_n_updates: ``None`` for no rows
    """

    def __init__(self, every_n_updates: int | None = None) -> None:
        if every_n_updates is not None:
            check_positive_int("every_n_updates", every_n_updates)
        self.every_n_updates = every_n_updates
        self._ranks: Ranks | None = None
        self._background: InBackground | None = None
        #: The epoch's sums of losses and weights in the last row, by which the next row's mean is found.
        self._sums = (0, 0.0, 0.0)
        self._last_row: dict[str, Any] = {}

    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        """Write a row. Called on the first process only, in order, in the background."""
        raise NotImplementedError

    def in_background(self, job: Callable[[], None]) -> None:
        """Do something in the background, after the rows so far."""
        if self._background is None:
            self._background = InBackground()
        self._background.do(job)

    def wait(self) -> None:
        """Wait for what is done in the background."""
        if self._background is not None:
            self._background.wait()

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        self._ranks = Ranks(trainer.accelerator)  # a group of its own: nothing else waits for these sums
        self._background = None  # that of a run that failed may wait for other processes for ever
        self._sums, self._last_row = (0, 0.0, 0.0), {}

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        every, window = self.every_n_updates, trainer.gradient_window
        if every is None or trainer.progress.update % every or window is None or window.is_open:
            return
        tracker, metrics = trainer.loss_trackers["loss"], trainer.step_metrics
        named = {"total": tracker.total_loss, "count": tracker.running_count, **dict(sorted(metrics.items()))}
        row = self._begin(trainer, named)
        self.in_background(lambda: self._average(row))

    def _begin(self, trainer: Trainer, named: dict[str, Any]) -> _Row:
        """Begin to copy the numbers to host memory."""
        device = trainer.device
        if device.type == "cpu":
            values, arrived = torch.tensor([float(value) for value in named.values()], dtype=torch.float64), None
        else:
            dtype = torch.float32 if device.type == "mps" else torch.float64
            parts = [torch.as_tensor(value, dtype=dtype, device=device).detach() for value in named.values()]
            values, arrived = torch.stack(parts).to("cpu", non_blocking=True), None
            if device.type == "cuda":
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record()
        return _Row(trainer.progress.update, trainer.progress.epoch, list(named), values, arrived)

    def _average(self, row: _Row) -> None:
        """Average a row over the processes, and write it."""
        assert self._ranks is not None
        if row.arrived is not None:
            row.arrived.synchronize()
        summed = dict(zip(row.names, self._ranks.sum(row.values.tolist()), strict=True))
        epoch, total_before, count_before = self._sums
        if epoch != row.epoch:
            total_before = count_before = 0.0
        total, count = summed.pop("total"), summed.pop("count")
        self._sums = row.epoch, total, count
        values = {name: value / self._ranks.world_size for name, value in summed.items()}
        if count > count_before:
            values = {"loss": (total - total_before) / (count - count_before), **values}
        self._last_row = {"update": row.update, "epoch": row.epoch, "values": values}
        if self._ranks.rank == 0:
            self.write_row(row.update, row.epoch, values)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        background, self._background = self._background, None
        if background is not None:
            background.close()
            background.wait()

    def state_dict(self) -> dict[str, Any]:
        """Wait for all rows, and return what the next needs of the last. To be called on every process."""
        self.wait()
        return {"sums": list(self._sums), "last_row": dict(self._last_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        epoch, total, count = state["sums"]
        self._sums, self._last_row = (int(epoch), total, count), dict(state["last_row"])
