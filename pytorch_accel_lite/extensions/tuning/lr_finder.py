"""``trainer.find_lr()``: the learning rate range test, and the rate that it suggests."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pytorch_accel_lite.data import CollateFunction, LoaderKwargs, NamedData
from pytorch_accel_lite.extending import RunRequest, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int, check_range
from pytorch_accel_lite.extension_tools.data_and_batches import DEFAULT_BATCH_SIZE
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import layer_scales, set_option
from pytorch_accel_lite.extension_tools.texts_and_pages import find_plots, short_repr
from pytorch_accel_lite.extensions.trials import Trial
from pytorch_accel_lite.optimizers import CombinedOptimizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Decay per step of the running mean of the losses, which detects divergence.
_SMOOTHING = 0.9


@dataclass(repr=False)
class LearningRates:
    """The result of ``Trainer.find_lr()``; its repr is a sentence.

    Args:
        lrs: the learning rates that were tried, in increasing order, for the parameter group with the largest rate
        losses: the loss of the update made with each learning rate
        smoothed: the losses, each averaged with its neighbours on both sides
        suggestion: the learning rate at which the smoothed loss falls fastest; ``None`` if it never falls
    """

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot the losses over the learning rates, with the suggestion (extra ``plot``).

        Args:
            path: where to save the plot; ``None`` does not save it
        """
        plots = find_plots("LearningRates.plot")
        return plots.plot_range_test(self.lrs, self.losses, self.smoothed, self.suggestion, path)

    def __repr__(self) -> str:
        tried = f"Tried {len(self.lrs)} learning rates from {self.lrs[0]:.3g} to {self.lrs[-1]:.3g}."
        if self.suggestion is None:
            return f"{tried} The loss does not fall with any of them: look at plot(), or try smaller ones."
        return f"{tried} The loss falls fastest at {self.suggestion:.3g}."


def find_lr(
    self: TrainerLike,
    train_dataset: NamedData,
    per_device_batch_size: int = DEFAULT_BATCH_SIZE,
    min_lr: float = 1e-6,
    max_lr: float = 10.0,
    num_steps: int = 100,
    gradient_accumulation_steps: int | Mapping[int, int] = 1,
    gradient_clip_value: float | None = None,
    train_dataloader_kwargs: LoaderKwargs | None = None,
    collate_fn: CollateFunction | None = None,
    *,
    gradient_clip_norm: float | None = None,
    diverged: float = 4.0,
    optimizer: str | None = None,
) -> LearningRates:
    """Run a learning rate range test: increase the learning rate with every update, and suggest one.

    See Smith, "Cyclical Learning Rates for Training Neural Networks" (2017). The model, the optimizer and the
    generators are restored afterwards; the run history and the callbacks are not involved. Must be called on every
    process. Other arguments are those of ``train()``.

    Args:
        min_lr: first learning rate of the parameter group with the largest rate; the rates of other groups keep their
            ratio to it
        max_lr: last learning rate
        num_steps: number of updates, at least 10
        diverged: stop once the smoothed loss exceeds its minimum by this factor; if losses are negative, once it has
            risen by this factor times its previous fall from the largest of the first losses
        optimizer: name of the optimizer whose rate to increase, if there are several; the others keep theirs. By
            default the rates of all optimizers increase together. An overridden ``train_step`` needs a name, because
            each optimizer has its own loss there.

    Returns:
        the rates, the losses, a ``suggestion`` and ``plot()``; print it in a script; consoles and notebooks show it by
        themselves
    """
    check_range("min_lr", min_lr, above=0)
    check_range("max_lr", max_lr, above=0)
    check_range("diverged", diverged, above=1)
    if min_lr >= max_lr:
        raise ValueError(f"min_lr={min_lr!r} must be less than max_lr={max_lr!r}.")
    if check_positive_int("num_steps", num_steps) < 10:
        raise ValueError(f"num_steps={num_steps!r} must be at least 10: fewer do not make a curve.")
    request = RunRequest(
        num_epochs=1,
        gradient_accumulation_steps=gradient_accumulation_steps,
        gradient_clip_value=gradient_clip_value,
        gradient_clip_norm=gradient_clip_norm,
    )
    size = per_device_batch_size
    any_update = ("train_step", "closure", "logical_processes")
    kwargs = train_dataloader_kwargs
    trial = Trial(self, "find_lr", train_dataset, size, request, kwargs, collate_fn, supports=any_update)
    with trial.running():
        return _range_test(trial, optimizer, min_lr, max_lr, num_steps, diverged)


def _groups_to_test(trial: Trial, name: str | None) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, or of all."""
    trainer = trial.trainer
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # without Accelerate's wrapper
    parts = inner.parts if isinstance(inner, CombinedOptimizer) else {}
    names = ", ".join(map(repr, parts))
    if name is None and trial.run.training_step.updates_one_by_one and len(parts) > 1:
        raise ValueError(f"find_lr() needs optimizer=, one of {names}: {type(trainer).__name__} updates each alone.")
    if name is not None and name not in parts:
        raise ValueError(
            f"optimizer={short_repr(name)}: there is no such optimizer, only {names or 'one without a name'}."
        )
    groups: list[dict[str, Any]] = (trainer.optimizer if name is None else parts[name]).param_groups
    return groups


def _range_test(
    trial: Trial, name: str | None, min_lr: float, max_lr: float, num_steps: int, diverged: float
) -> LearningRates:
    """Train with a learning rate that increases with every update, until the loss diverges."""
    groups = _groups_to_test(trial, name)
    watched = "loss" if not trial.run.training_step.updates_one_by_one or name is None else name
    set_rates = [float(group["lr"]) for group in groups]
    rates = [rate * scale for rate, scale in zip(set_rates, layer_scales(groups, set_rates), strict=True)]
    largest = max(rates)
    shares = [rate / largest if largest else 1.0 for rate in rates]
    lrs: list[float] = []
    losses: list[float] = []
    mean = 0.0
    lowest = math.inf
    batches = trial.batches()
    trial.trainer.train_epoch_start()
    for number, lr in enumerate(np.geomspace(min_lr, max_lr, num_steps).tolist()):
        for group, share in zip(groups, shares, strict=True):
            set_option(group, "lr", lr * share)
        means = trial.update(batches)
        loss = means.get(watched, means["loss"])
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        if not math.isfinite(mean):
            break
        lrs.append(lr)
        losses.append(loss)
        corrected = mean / (1 - _SMOOTHING ** (number + 1))
        lowest = min(lowest, corrected) if number >= 10 else math.inf
        # Losses that may be negative have no factor: what they have fallen by, and vary by at first, stands for it.
        if corrected - lowest > (diverged - 1) * (lowest if min(losses) > 0 else max(losses[:11]) - lowest):
            break
    if len(lrs) < 3:
        raise ValueError(f"The loss is not finite with learning rates as small as min_lr={min_lr!r}. Try smaller ones.")
    smoothed = _smooth(np.asarray(losses))
    return LearningRates(lrs, losses, smoothed.tolist(), _steepest(lrs, np.asarray(losses), smoothed))


def _smooth(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Smooth the losses with a Gaussian. A running mean would lag behind, and the suggestion would be too high."""
    at = np.arange(len(losses))
    weights = np.exp(-0.5 * ((at[:, None] - at) / max(2.0, len(losses) / 20)) ** 2)
    smoothed: NDArray[np.float64] = weights @ np.minimum(losses, losses[: len(losses) // 2 + 1].max()) / weights.sum(1)
    return smoothed


def _steepest(lrs: list[float], losses: NDArray[np.float64], smoothed: NDArray[np.float64]) -> float | None:
    """Return the rate at which the loss falls fastest to its minimum, over the logarithm of the rates.

    The fall begins where the loss is last near its largest value: before, it varies without falling. A fall of less
    than a tenth of the initial loss counts as noise; if losses are negative, a fall of less than single ones vary by.
    Then the result is ``None``.
    """
    lowest = int(smoothed.argmin())
    noise = 0.1 * smoothed[0] if losses.min() > 0 else np.std((losses - smoothed)[: lowest + 1])
    fall = smoothed[:lowest].max() - smoothed[lowest] if lowest >= 2 else 0.0
    if fall == 0.0 or fall < noise:
        return None
    begin = int(np.flatnonzero(smoothed[:lowest] >= smoothed[lowest] + 0.9 * fall)[-1])
    slopes = np.gradient(smoothed, np.log(lrs))
    return lrs[begin + int(slopes[begin:lowest].argmin())]
