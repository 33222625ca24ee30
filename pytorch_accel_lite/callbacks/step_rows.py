"""What loggers have in common: a row of numbers every n updates, means over all processes, which no step waits for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.events import TrainerCallback
from pytorch_accel_lite.utils import check_positive_int

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


# So many rows are kept while their numbers are copied from a device.
_ROWS_BEHIND = 4


class _Pending(NamedTuple):
    update: int
    epoch: int
    names: list[str]
    values: torch.Tensor
    arrived: torch.cuda.Event | None


class StepRows(TrainerCallback):
    """Base class of callbacks that log every n updates: the mean loss since the last row, and ``trainer.step_metrics``.

    A row is made at the end of the step, before any training state is saved, and is written at the latest when the
    callback's state is taken: so every state has its rows, and no row is lost or written twice. Numbers on a device are
    copied while it computes; they are averaged over the processes, and written, a few rows later.

    :param every_n_updates: ``None`` for no rows
    """

    def __init__(self, every_n_updates: int | None = None) -> None:
        if every_n_updates is not None:
            check_positive_int("every_n_updates", every_n_updates)
        self.every_n_updates = every_n_updates
        self._ranks: Ranks | None = None
        self._pending: deque[_Pending] = deque()
        #: The epoch's sums of losses and weights in the last row, by which the next row's mean is found.
        self._sums = (0, 0.0, 0.0)
        self._last_row: dict[str, Any] = {}

    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        """Write a row. Called on the first process only, in order."""
        raise NotImplementedError

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        self._ranks = Ranks(trainer.accelerator)  # a group of its own: nothing else waits for these sums
        self._pending.clear()
        self._sums, self._last_row = (0, 0.0, 0.0), {}

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        every, window = self.every_n_updates, trainer.gradient_window
        if every is None or trainer.progress.update % every or window is None or window.is_open:
            return
        self._flush(wait=False)
        tracker, metrics = trainer.loss_trackers["loss"], trainer.step_metrics
        named = {"total": tracker.total_loss, "count": tracker.running_count, **dict(sorted(metrics.items()))}
        self._pending.append(self._begin(trainer, named))
        if trainer.device.type == "cpu":
            self._flush(wait=True)

    def _begin(self, trainer: Trainer, named: dict[str, Any]) -> _Pending:
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
        return _Pending(trainer.progress.update, trainer.progress.epoch, list(named), values, arrived)

    def _flush(self, wait: bool) -> None:
        """Write all rows but the latest few, whose numbers may be on their way; with ``wait`` those too."""
        assert self._ranks is not None
        while self._pending:
            if not wait and len(self._pending) < _ROWS_BEHIND:
                return
            row = self._pending.popleft()
            if row.arrived is not None:
                row.arrived.synchronize()  # it has arrived long ago, unless all is asked for
            summed = self._ranks.sum(row.values.tolist())
            self._write(row, dict(zip(row.names, summed, strict=True)))

    def _write(self, row: _Pending, summed: dict[str, float]) -> None:
        assert self._ranks is not None
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

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        self._flush(wait=True)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        if self._ranks is not None:
            self._flush(wait=True)

    def state_dict(self) -> dict[str, Any]:
        """Write what is pending, and return what the next row needs of the last. To be called on every process."""
        if self._ranks is not None:
            self._flush(wait=True)
        return {"sums": list(self._sums), "last_row": dict(self._last_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        epoch, total, count = state["sums"]
        self._sums, self._last_row = (int(epoch), total, count), dict(state["last_row"])
