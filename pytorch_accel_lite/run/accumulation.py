"""The number of batches in an update, and the weight of each batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer

from pytorch_accel_lite.base.machine import accumulation_dtype
from pytorch_accel_lite.base.modules import local_shard
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.optimizers.optimizer_parts import optimized_parameters


class Accumulation:
    """The number of batches per process in an update, which may change during a run.

    Args:
        steps: the number; or a dict whose keys are numbers of updates, after which the value is the number
    """

    def __init__(self, steps: int | Mapping[int, int]) -> None:
        self._sizes = sorted(steps.items()) if isinstance(steps, Mapping) else [(0, steps)]

    @property
    def changes(self) -> bool:
        """Whether the number of batches changes."""
        return len(self._sizes) > 1

    @property
    def last_change(self) -> int:
        """The number of updates after which the number of batches no longer changes."""
        return self._sizes[-1][0]

    @property
    def largest(self) -> int:
        """The largest number of batches."""
        return max(size for _, size in self._sizes)

    def window_size_after(self, updates: int) -> int:
        """Return the number of batches in the update that follows a number of updates."""
        return [size for first, size in self._sizes if first <= updates][-1]

    def updates_after(self, steps: int, updates: int = 0) -> int:
        """Return the number of updates after an epoch of ``steps`` batches that begins after ``updates`` updates."""
        while steps > 0:
            size = self.window_size_after(updates)
            change = min((first for first, _ in self._sizes if first > updates), default=math.inf)
            count = int(min(math.ceil(steps / size), change - updates))
            steps -= count * size
            updates += count
        return updates

    def updates_in(self, epochs: int, steps: int) -> int:
        """Return the number of updates in epochs of ``steps`` batches."""
        updates = 0
        for epoch in range(epochs):
            if updates >= self.last_change:
                return updates + (epochs - epoch) * (self.updates_after(steps, updates) - updates)
            updates = self.updates_after(steps, updates)
        return updates

    def epochs_for(self, updates: int, steps: int) -> int:
        """Return the number of epochs of ``steps`` batches for a number of updates."""
        epochs = done = 0
        while done < updates:
            after = self.updates_after(steps, done)
            if done >= self.last_change:
                return epochs + math.ceil((updates - done) / (after - done))
            epochs, done = epochs + 1, after
        return epochs


#: A number of samples or items, or another weight in a mean; as a tensor, it has one element.
Count: TypeAlias = int | float | torch.Tensor


class WindowCounts(NamedTuple):
    """What a window has counted so far, as described in ``GradientWindow``."""

    has_gradients: bool
    nominal_size: float
    true_size: Count
    items_per_batch: float | None


class GradientWindow:
    """Weights the micro-batches of one update so that their gradients add up to those of the full window.

    Each loss is a mean over a number of items (samples, or ``num_items_in_batch``). It is scaled by its share of a
    *nominal* window, in which every micro-batch of every rank has the same size. Just before clipping, the gradients
    are multiplied by the ratio of nominal to true size, which is 1 except for ragged windows. This is exact for
    micro-batches of unequal size, a short last window and any number of ranks, whose gradients DDP averages. With a
    single micro-batch, the true size is known at once and is used directly.

    Args:
        ranks: the processes whose gradients are averaged
        device: the device of the gradients
        steps: number of micro-batches per rank in a full window; may change between windows
        batch_size: number of samples in a nominal micro-batch of one rank

    Attributes:
        filled: number of micro-batches in the window so far
        is_ending: whether the current micro-batch is the last of the window
        has_gradients: whether there are gradients that no update has used yet
        nominal_size: number of items in a full window
        true_size: number of items in this window so far
        is_in_step: whether a step has begun that has not been counted yet
        is_split: whether batches are split into parts, which must be weighted even with one process
        is_guarded: whether a rank may fail within a step, so that ranks must not communicate there
        items_per_batch: number of items in a nominal micro-batch, fixed by the first batch that returns
            ``num_items_in_batch``; ``None`` if items are samples
        has_items: whether the batches so far have come with a number of items; ``None`` before the first batch
    """

    def __init__(self, ranks: Ranks, device: torch.device, steps: int, batch_size: int) -> None:
        self._ranks = ranks
        self._device = device
        self.steps = steps
        self.filled = 0
        self.is_ending = False
        self._batch_size = batch_size
        self.has_gradients = False
        self.nominal_size: float = 1
        self.true_size: Count = 0
        self.is_in_step = False
        self.is_split = False
        self.is_guarded = False
        self.items_per_batch: float | None = None
        self.has_items: bool | None = None

    @property
    def is_between_updates(self) -> bool:
        """Whether the gradients of all steps have been used and counted, so that a run could resume from here."""
        return not (self.has_gradients or self.is_in_step)

    @property
    def counted(self) -> WindowCounts:
        """The counts of the window so far; set them to count a batch again."""
        return WindowCounts(self.has_gradients, self.nominal_size, self.true_size, self.items_per_batch)

    @counted.setter
    def counted(self, counts: WindowCounts) -> None:
        self.has_gradients, self.nominal_size, self.true_size, self.items_per_batch = counts

    def reset(self) -> None:
        """Begin a window without gradients."""
        self.has_gradients = False
        self.nominal_size, self.true_size = 1, 0

    def scale(self, loss: torch.Tensor, num_samples: int, total_samples: int, items: Count | None) -> torch.Tensor:
        """Return the loss weighted by its share of the window.

        Args:
            num_samples: number of samples in this rank's micro-batch; 0 for a filler batch
            total_samples: number of samples in this micro-batch over all ranks
            items: number of items averaged in the loss, unless the items are samples

        Raises:
            ValueError: if only some of the batches have a number of items
        """
        self.has_gradients = True
        if (items is not None) is not self.has_items and num_samples:
            self.note_items(items)
        if self.steps == 1 and self._ranks.world_size == 1 and not self.is_split:
            self.nominal_size = self.true_size = 1
            return loss
        local: Count = num_samples
        added: Count = total_samples
        nominal: float = self._batch_size
        if items is not None:
            local = added = as_weight(items) if num_samples else 0
            if self.items_per_batch is None and self.is_guarded:
                self.items_per_batch = nominal  # any value would do that is the same on all ranks
            elif self.items_per_batch is None:  # once per run, the only read from the device
                self.items_per_batch = max(self._ranks.sum([float(local)])[0] / self._ranks.world_size, 1.0)
            nominal = self.items_per_batch
        elif self.steps == 1 and total_samples and not (self.is_split or self.is_guarded):
            self.nominal_size = self.true_size = total_samples
            share = num_samples * self._ranks.world_size / total_samples
            return loss if share == 1 else loss * share
        self.nominal_size = nominal * self.steps * self._ranks.world_size
        self.true_size = self.true_size + added
        return loss * (local / (nominal * self.steps))

    def note_items(self, items: Count | None) -> None:
        """Note whether the first batch has a number of items; another batch of which that differs is an error."""
        if self.has_items is not None:
            with_, without = ("this batch", "earlier ones") if items is not None else ("earlier batches", "this one")
            raise ValueError(
                f"num_items_in_batch was returned for {with_}, and not for {without}. A loss is weighted by its items "
                "or by its samples, and the two cannot be added up: return it for every batch, or for none."
            )
        self.has_items = items is not None

    def finish(self, optimizer: Optimizer) -> Count:
        """Correct the gradients if the window's true size differs from the nominal one, and start a new window.

        Returns:
            the factor by which the gradients were multiplied
        """
        nominal, true = self.nominal_size, self.true_size
        self.has_gradients, self.nominal_size, self.true_size = False, 1, 0  # inlines reset()
        if self.items_per_batch is not None:
            true = self._total_items(true)
        if isinstance(true, torch.Tensor):
            true = torch.where(true == 0, nominal, true)  # a window without any items has gradients of 0
        elif true in (0, nominal):
            return 1
        gradients = [local_shard(p.grad) for p in optimized_parameters(optimizer) if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, nominal / true)
        return nominal / true

    def _total_items(self, local: Count) -> Count:
        """Return the number of items in the window over all ranks."""
        if self._ranks.world_size == 1:
            return local
        zero = torch.zeros((), dtype=accumulation_dtype(self._device), device=self._device)
        return self._ranks.sum_on_device(zero + as_weight(local))  # copying a number would wait for the device


def as_weight(count: Count) -> Count:
    """Return a count as float64, if the device supports it: dividing integers would give float32."""
    if isinstance(count, torch.Tensor):
        return count.reshape(()).to(accumulation_dtype(count.device))
    return count
