"""Finding settings by trying them: a learning rate, a batch size."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate.utils.memory import clear_device_cache

from pytorch_accel_lite.batches import total_loss
from pytorch_accel_lite.guarding import is_out_of_memory
from pytorch_accel_lite.plotting import plot_range_test
from pytorch_accel_lite.utils import check_positive_int, check_range

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pytorch_accel_lite.trainer import Trainer

#: The running mean of the losses, by which an explosion is seen, keeps so much of itself at each step.
_SMOOTHING = 0.9


@dataclass
class LearningRates:
    """What :meth:`Trainer.find_lr <pytorch_accel_lite.Trainer.find_lr>` found.

    :param lrs: the learning rates that were tried, rising; of the parameter group with the largest
    :param losses: the loss of the update made with each
    :param smoothed: the losses, each averaged with its neighbours on both sides
    :param suggestion: the rate at which the smoothed loss falls fastest, ``None`` when it never falls
    """

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the losses over the learning rates, with the suggestion (extra ``plot``).

        :param path: where to save the picture; ``None``: not saved
        """
        return plot_range_test(self.lrs, self.losses, self.smoothed, self.suggestion, path)

    def __str__(self) -> str:
        tried = f"Tried {len(self.lrs)} learning rates from {self.lrs[0]:.3g} to {self.lrs[-1]:.3g}."
        if self.suggestion is None:
            return f"{tried} The loss falls with none of them: look at plot(), or try smaller ones."
        return f"{tried} The loss falls fastest at {self.suggestion:.3g}."


def check_range_test(min_lr: float, max_lr: float, num_steps: int) -> None:
    """Check the arguments of a range test."""
    check_range("min_lr", min_lr, above=0)
    check_range("max_lr", max_lr, above=0)
    if min_lr >= max_lr:
        raise ValueError(f"min_lr={min_lr!r} must be less than max_lr={max_lr!r}.")
    if check_positive_int("num_steps", num_steps) < 10:
        raise ValueError(f"num_steps={num_steps!r} must be at least 10: fewer make no curve.")


def range_test(trainer: Trainer, min_lr: float, max_lr: float, num_steps: int, diverged: float) -> LearningRates:
    """Train with a learning rate that rises from update to update, until the loss explodes."""
    groups = trainer.optimizer.param_groups
    largest = max(float(group["lr"]) for group in groups)
    shares = [float(group["lr"]) / largest if largest else 1.0 for group in groups]
    lrs, losses = list[float](), list[float]()
    mean, lowest, batches = 0.0, math.inf, _batches(trainer)
    trainer.train_epoch_start()
    for number in range(num_steps):
        lr = min_lr * (max_lr / min_lr) ** (number / (num_steps - 1))
        for group, share in zip(groups, shares, strict=True):
            group["lr"] = lr * share
        loss = _update(trainer, batches)
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        if not math.isfinite(mean):
            break
        lrs.append(lr)
        losses.append(loss)
        corrected = mean / (1 - _SMOOTHING ** (number + 1))
        lowest = min(lowest, corrected) if number >= 10 else math.inf
        if corrected > diverged * lowest:
            break
    if len(lrs) < 3:
        raise ValueError(f"The loss is not finite with learning rates as small as min_lr={min_lr!r}. Try smaller ones.")
    smoothed = _smooth(np.asarray(losses))
    return LearningRates(lrs, losses, smoothed.tolist(), _steepest(lrs, smoothed))


def _smooth(losses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Average each loss with its neighbours, by a bell curve: a running mean would lag behind, and suggest too much."""
    at = np.arange(len(losses))
    weights = np.exp(-0.5 * ((at[:, None] - at) / max(2.0, len(losses) / 20)) ** 2)
    averages: np.ndarray[Any, Any] = weights @ np.minimum(losses, losses[: len(losses) // 2 + 1].max())
    averages /= weights.sum(1)
    return averages


def _steepest(lrs: list[float], smoothed: np.ndarray[Any, Any]) -> float | None:
    """Return the rate at which the loss falls fastest over the logarithm of the rates, before its minimum.

    That must be a fall, and no noise: of at least a tenth of the loss at the start.
    """
    lowest = int(smoothed.argmin())
    if lowest < 2 or smoothed[:lowest].max() - smoothed[lowest] < 0.1 * abs(smoothed[0]):
        return None
    slopes = np.gradient(smoothed, np.log(lrs))
    return lrs[int(slopes[:lowest].argmin())]


def _batches(trainer: Trainer) -> Iterator[Any]:
    """Yield batches without end, from one epoch after the other."""
    for epoch in itertools.count(1):
        empty = True
        for loaded in trainer.train_dataloader.steps(epoch):
            empty = False
            yield loaded
        if empty:
            raise ValueError("train_dataset gave no batch: it is empty, or exhausted.")


def _update(trainer: Trainer, batches: Iterator[Any]) -> float:
    """Make an update, and return its mean loss over all processes."""
    window = trainer.gradient_window
    assert window is not None
    total = count = 0.0
    for step in range(window.steps):
        loaded = next(batches)
        with trainer._gradient_sync(ends_window=step == window.steps - 1):
            output = trainer.calculate_train_batch_loss(loaded.batch)
            trainer._complete_output(output, loaded.batch, "calculate_train_batch_loss", training=True)
            own = output["batch_size"] if loaded.num_samples is None else loaded.num_samples
            together = own if loaded.total_samples is None else loaded.total_samples
            items = output.get("num_items_in_batch")
            trainer.backward_step(window.scale(output["loss"], own, together, items))
        weight = float(own if items is None or not own else items)
        total, count = total + float(output["loss"].detach()) * weight, count + weight
    window.finish(trainer.optimizer, trainer.device)
    trainer.clip_gradients()
    trainer.optimizer_step()
    trainer.optimizer_zero_grad()
    total, count = trainer.ranks.sum([total, count])
    return total / count


def largest_batch(trainer: Trainer, load: Callable[[int], Any], start: int, most: int, num_steps: int) -> int:
    """Return the largest batch size with which a few updates fit into memory, the same on every process.

    :param load: returns a batch of so many samples
    """
    fits, too_large, size = 0, most + 1, min(start, most)
    while True:
        if _fits(trainer, load(size), num_steps):
            fits = size
        else:
            too_large = size
        if too_large - fits <= 1:
            return fits
        size = min(2 * fits, most) if too_large > most and fits else (fits + too_large) // 2


def _fits(trainer: Trainer, batch: Any, num_steps: int) -> bool:
    """Make a few updates with a batch, without the other processes: one that fails must not leave them waiting."""
    failed = False
    with trainer._unwrapped_model():
        try:
            for _ in range(num_steps):
                trainer.backward_step(total_loss(trainer.calculate_train_batch_loss(batch)["loss"]))
                trainer.optimizer_step()
                trainer.optimizer_zero_grad()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
    trainer.optimizer_zero_grad()
    clear_device_cache(garbage_collection=failed)
    return not any(trainer.all_gather_object(failed))
