"""Running means of losses, and of values that a program logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from pytorch_accel_lite.base.display import call_repr
from pytorch_accel_lite.base.machine import accumulation_dtype, to_float
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.outputs import mean_that_counts
from pytorch_accel_lite.data.sources import BatchOutput
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.run.accumulation import Count

_WITHOUT_LOSS = ""  # counts the samples of evaluations that compute no loss


class LossTracker:
    """A running mean, weighted by batch size, whose sums stay on the device until they are read.

    Attributes:
        loss_value: the last value passed to ``update()``
        total_loss: the weighted sum so far: a number, or for losses on a device a float64 tensor there (float32 on
            devices without float64)
        running_count: the sum of the weights so far
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all sums to zero."""
        self.loss_value: torch.Tensor | float = 0
        self.total_loss: torch.Tensor | float = 0
        self.running_count: Count = 0

    def update(self, loss_batch_value: torch.Tensor | float, batch_size: Count = 1) -> None:
        """Add the mean loss of a batch, weighted by its size. A mean over nothing does not count, even if it is NaN.

        Args:
            loss_batch_value: a number, or a tensor, whose elements are averaged
            batch_size: a number, or a tensor with one element
        """
        loss: Any = loss_batch_value
        if isinstance(loss, torch.Tensor) and loss.ndim:
            loss = loss if loss.is_floating_point() else loss.float()  # in evaluation, samples may be right or wrong
            loss = loss.reshape(()) if loss.numel() == 1 else loss.mean()
        if isinstance(batch_size, torch.Tensor) and batch_size.is_cpu:
            batch_size = to_float(batch_size)
        if isinstance(loss, torch.Tensor) and loss.is_cpu and not isinstance(self.total_loss, torch.Tensor):
            # The usual case avoids a further call, because this runs in every step.
            loss = loss.tolist() if type(loss) is torch.Tensor else to_float(loss)
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
            self._add_on_device(loss, batch_size)
        elif isinstance(batch_size, torch.Tensor):
            self.total_loss += mean_that_counts(loss, batch_size) * batch_size
        elif batch_size:
            self.total_loss += loss * batch_size
        self.loss_value = loss
        self.running_count = self.running_count + batch_size  # not in place: it may be the user's tensor

    def _add_on_device(self, loss: torch.Tensor, batch_size: Count) -> None:
        if not isinstance(self.total_loss, torch.Tensor):
            self.total_loss = torch.full((), self.total_loss, dtype=accumulation_dtype(loss.device), device=loss.device)
        if isinstance(batch_size, torch.Tensor):
            loss = mean_that_counts(loss.to(self.total_loss.dtype), batch_size) * batch_size
            batch_size = 1
        if batch_size:
            self.total_loss.add_(loss.reshape(()), alpha=batch_size)

    def state_dict(self) -> StateDict:
        """Return the sums."""
        return {"total_loss": self.total_loss, "running_count": self.running_count, "loss_value": self.loss_value}

    def load_state_dict(self, state: StateDict) -> None:
        """Load sums returned by ``state_dict()``."""
        for name in ("loss_value", "total_loss", "running_count"):
            value = state[name]
            setattr(self, name, value.clone() if isinstance(value, torch.Tensor) else value)

    def load_sum(self, total: float, count: float) -> None:
        """Load a weighted sum, and the sum of its weights."""
        self.loss_value, self.total_loss, self.running_count = total / count if count else 0.0, total, count

    def __repr__(self) -> str:
        average = {} if isinstance(self.total_loss, torch.Tensor) else {"average": self.average}  # no device read
        return call_repr("LossTracker", {**average, "running_count": self.running_count})

    @property
    def average(self) -> float:
        """The weighted mean so far, 0 before the first batch. Reads from the device."""
        count = float(self.running_count)
        return float(self.total_loss) / count if count else 0.0


class LossTrackers(dict[str, LossTracker]):
    """The running losses of an epoch or evaluation, by name.

    Contains ``loss``, its parts if a step returns several losses, and the values logged by steps and callbacks.

    Attributes:
        is_empty: whether no step has added anything
        parts: names of the parts of the loss
        logged: names of the logged values
        is_recorded: whether the means have been computed, so that nothing can be added
        num_items: number of items averaged in a part of the loss in this step, for parts with a number of their own
        latest_batch: the batch of the latest step, and the number of its samples as the step returned it
        unweighed: values logged before their step has returned, each with the batch and the name
    """

    def __init__(self) -> None:
        super().__init__(loss=LossTracker())
        self.is_empty = True
        self.parts: set[str] = set()
        self.logged: set[str] = set()
        self.is_recorded = False
        self.num_items: dict[str, Count] = {}
        self.latest_batch: tuple[Batch | None, Count] = None, 0
        self.unweighed: list[tuple[Batch, str, torch.Tensor | float]] = []

    def add(self, output: BatchOutput) -> None:
        """Add the losses of a step, each a mean over its samples, or over its ``num_items_in_batch``."""
        self.is_empty = False
        weight: Count = output["num_items_in_batch"] if "num_items_in_batch" in output else output["batch_size"]
        if output["loss"] is None:
            self.of(_WITHOUT_LOSS).update(0.0, weight)
            return
        self["loss"].update(output["loss"], weight)
        if "losses" in output:
            for name in self.logged & output["losses"].keys():
                raise ValueError(f"{name!r} is already a loss of the step. Log the value under another name.")
            self.parts.update(output["losses"])
            for name, loss in output["losses"].items():
                self.of(name).update(loss, self.num_items.get(name, weight))

    def state_dict(self) -> StateDict:
        """Return the sums of logged values. A step that fails may have changed them; it cannot have changed losses."""
        logged = {name: t.state_dict() for name, t in self.items() if name != "loss" and name not in self.parts}
        return {"logged": logged, "unweighed": len(self.unweighed)}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore sums returned by ``state_dict()``, discarding values logged since."""
        del self.unweighed[state["unweighed"] :]
        for name in self.keys() - self.parts - state["logged"].keys() - {"loss"}:
            del self[name]
        for name, sums in state["logged"].items():
            self.of(name).load_state_dict(sums)

    def of(self, name: str) -> LossTracker:
        """Return the tracker for a name, creating it if necessary."""
        return self.setdefault(name, LossTracker())

    def log(self, name: str, value: torch.Tensor | float, weight: Count) -> None:
        """Add a logged value, which is a mean over ``weight`` items."""
        self.logged.add(name)
        self.of(name).update(value, weight)

    def log_per_sample(self, batch: Batch, name: str, value: torch.Tensor | float) -> None:
        """Add a value that is a mean over the samples of a batch, once the step has returned their number."""
        self.logged.add(name)
        self.unweighed.append((batch, name, value))
        if batch is self.latest_batch[0]:
            self.weigh_logged()

    def note_batch_size(self, batch: Batch, size: Count) -> None:
        """Note the number of samples in a batch, as its step has returned it."""
        self.latest_batch = batch, size
        if self.unweighed:
            self.weigh_logged()

    def weigh_logged(self) -> None:
        """Add the values that were logged for a batch before its size was known."""
        batch, size = self.latest_batch
        values, self.unweighed = self.unweighed, []
        for entry in values:
            if entry[0] is batch:
                self.log(*entry[1:], size)
            else:  # the value was logged for the whole batch, of which this is a part
                self.unweighed.append(entry)

    def local_sums(self) -> list[dict[str, tuple[float, float]]]:
        """Return the sums of the losses and of their weights on this rank, by name. Reads from the device."""
        return [{key: (float(t.total_loss), float(t.running_count)) for key, t in self.items()}]

    @staticmethod
    def add_up(sums: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
        """Add up sums of losses and of their weights, by name."""
        total: dict[str, tuple[float, float]] = {}
        for part in sums:
            for name, (loss, weight) in part.items():
                before = total.get(name, (0.0, 0.0))
                total[name] = before[0] + loss, before[1] + weight
        return total

    def summed(self, ranks: Ranks) -> dict[str, tuple[float, float]]:
        """Return the sums of the losses and of their weights over all ranks, by name. Reads from the device."""
        return self.add_up(
            chain.from_iterable(ranks.repeat_if_process_lost(lambda: ranks.all_gather_object(self.local_sums())))
        )

    def means(self, ranks: Ranks, name: str) -> dict[str, float]:
        """Return the means over all ranks, by metric name.

        Args:
            name: format of the metric names, for example ``"train_{}_epoch"``

        Raises:
            ValueError: if nothing has been added on any rank, or if there were no items
        """
        means = {}
        self.is_recorded = True
        self.latest_batch, self.unweighed = (None, 0), []  # frees the last batch
        summed = self.summed(ranks)
        without_loss = summed.pop(_WITHOUT_LOSS, None)
        for key, (total, count) in summed.items():
            if count:
                means[name.format(key)] = total / count
            elif key == "loss" and not without_loss:
                if not all(ranks.all_gather_object(self.is_empty)):
                    raise ValueError("num_items_in_batch (or batch_size) is 0 in every batch: check how it is counted.")
                if name.startswith("train"):
                    raise ValueError("Every batch of the epoch was skipped.")
                argument = "dataset" if name.startswith("evaluation") else "eval_dataset"
                raise ValueError(f"{argument} gave no batch: it is empty or exhausted.")
        return means
