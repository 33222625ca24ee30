"""What would lower the memory that training takes, each estimated by making the steps in that way."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.optimizers.layer_groups import find_blocks
from pytorch_accel_lite.optimizers.operations import parts_of
from pytorch_accel_lite.tuning.pretending import Scenario, measure

if TYPE_CHECKING:
    from pytorch_accel_lite.data import Batch

_LEAST_GAIN = 0.05
_MOST_TRIES = 16
_GROWTH = 16  # of a size on which the peak does not depend
_USUAL_DEVICES = 8


class Peaks:
    """The peaks of scenarios, each measured once.

    :param read: the run for which the batch was read
    """

    def __init__(self, trainer: TrainerLike, read: Run, batch: Batch) -> None:
        self._trainer = trainer
        self._read = read
        self._batch = batch
        self._known: dict[Scenario, int | None] = {}

    def of(self, scenario: Scenario) -> int | None:
        """Return the peak, or ``None`` if the model does not work in that way."""
        if scenario not in self._known:
            self._known[scenario] = None
            with suppress(Exception), warnings.catch_warnings():  # blocks that cannot be recomputed, for example
                warnings.simplefilter("ignore")
                self._known[scenario] = measure(self._trainer, self._read, self._batch, scenario).peak
        return self._known[scenario]

    def note(self, scenario: Scenario, peak: int) -> None:
        """Keep a peak that has been measured."""
        self._known[scenario] = peak


def lower_peaks(trainer: TrainerLike, peaks: Peaks, scenario: Scenario, stage: str) -> dict[str, int]:
    """Return the peak after each change that lowers it by at least a twentieth, by its description, lowest first.

    :param stage: when the peak is
    """
    least = (1 - _LEAST_GAIN) * (peaks.of(scenario) or 0)
    found = {text: peaks.of(other) for text, other in _changes(trainer, scenario, stage)}
    helpful = {text: peak for text, peak in found.items() if peak is not None and peak <= least}
    return dict(sorted(helpful.items(), key=lambda item: item[1]))


def _changes(trainer: TrainerLike, scenario: Scenario, stage: str) -> Iterator[tuple[str, Scenario]]:
    """Yield what can be changed, with the scenario in which it is."""
    model = trainer.get_model(keep_torch_compile=False)
    blocks = find_blocks(model)
    if blocks and not getattr(model, "is_gradient_checkpointing", False):
        names = ", ".join(dict.fromkeys(type(block).__name__ for block in blocks))
        yield f"Activation checkpointing of the blocks ({names})", replace(scenario, recomputes=True)
    if scenario.batch_size > 1:
        half = scenario.batch_size // 2
        yield f"Batches of {half}", replace(scenario, batch_size=half)
    devices = scenario.world_size if scenario.world_size > 1 else _USUAL_DEVICES
    if scenario.sharding == "none":
        shared = replace(scenario, sharding="blocks", world_size=devices)
        yield f"fully_shard for each block and the model, on {devices} devices", shared
    else:
        yield f"{2 * devices} devices", replace(scenario, world_size=2 * devices)
    yield from _smaller_changes(trainer, model.parameters(), scenario, stage)


def _smaller_changes(
    trainer: TrainerLike, parameters: Iterable[Any], scenario: Scenario, stage: str
) -> Iterator[tuple[str, Scenario]]:
    """Yield what can be changed by an argument."""
    is_float32 = any(parameter.dtype == torch.float32 for parameter in parameters)
    if is_float32 and trainer.accelerator.mixed_precision == "no" and not is_overridden(trainer, "train_step"):
        yield "Accelerator(mixed_precision='bf16')", replace(scenario, computes_in_bf16=True)
    optimizer = trainer.optimizer
    fusable = [one for one in parts_of(optimizer).values() or [optimizer] if "fused" in getattr(one, "defaults", ())]
    if stage == "update" and fusable and not any(one.defaults["fused"] for one in fusable):
        yield f"{type(fusable[0]).__name__}(..., fused=True)", replace(scenario, updates_one_by_one=True)
    if scenario.sharding == "none" and scenario.world_size > 1 and not scenario.gradients_in_buckets:
        change = "DistributedDataParallelKwargs(gradient_as_bucket_view=True) in the accelerator's kwargs_handlers"
        yield change, replace(scenario, gradients_in_buckets=True)


def largest_batch(peaks: Peaks, scenario: Scenario, usable: float) -> int | None:
    """Return the largest batch size whose peak is at most ``usable`` bytes; 0 if none is, ``None`` if unknown.

    A peak is the largest of several amounts of memory, at different times, that rise in line with the size. So it is
    convex: its chords lead to sizes that are too small, and its secants to sizes that are too large, or to the answer.
    """
    known: dict[int, int] = {}

    def try_size(size: int) -> bool:
        peak = peaks.of(replace(scenario, batch_size=size))
        if peak is not None:
            known[size] = peak
        return peak is not None

    def meet(first: int, second: int) -> float:
        """Return the size at which the line through two peaks meets the limit."""
        rise = (known[second] - known[first]) / (second - first)
        return first + (usable - known[first]) / rise if rise > 0 else math.inf

    size = scenario.batch_size
    if not (try_size(size) and try_size(size // 2 or 2)):
        return None
    for number in range(_MOST_TRIES):
        fit = sorted(size for size, peak in known.items() if peak <= usable)
        too_large = sorted(known.keys() - fit)
        least = fit[-1] if fit else 0
        most = too_large[0] - 1 if too_large else math.inf
        if least == most:
            break
        guess = min((meet(*pair) for pair in (fit[-2:], too_large[:2]) if len(pair) == 2), default=math.inf)
        if too_large and (number % 2 or guess == math.inf):
            guess = meet(least, too_large[0]) if fit else most // 2
        elif guess == math.inf:
            guess = _GROWTH * least
        if not try_size(int(max(least + 1, min(guess, most)))):
            return None
    return max((size for size, peak in known.items() if peak <= usable), default=0)
