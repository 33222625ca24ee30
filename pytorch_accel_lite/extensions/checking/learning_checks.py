"""Checks of learning: the learning rates of the run, and whether the loss of a single batch falls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import set_option
from pytorch_accel_lite.extensions.checking.probe import (
    Finding,
    NotApplicableError,
    Probe,
    doubt,
    mistake,
    remark,
    targets_of,
    with_parts,
)
from pytorch_accel_lite.optimizers import CombinedOptimizer

#: After each of these numbers of updates, the share of its first value by which the loss of a single batch must have
#: fallen for the check to end early.
_ENOUGH = {20: 0.5, 50: 0.1, 100: 0.01, 200: 0.005}


#: The functions that distributions call to draw samples.
_SAMPLING = {"multinomial", "bernoulli", "normal"}


def check_schedule(probe: Probe) -> Iterator[Finding]:
    """Compute the learning rate of every update of the run.

    A schedule whose length is in epochs, but which is stepped after every update, ends long before the run. A schedule
    that is too long never reaches its end.

    Give the length of the schedule in updates, with TrainerPlaceholderValues, or pass scheduler_interval='epoch'.
    """
    try:
        curve = max(probe.curves, key=max)
    except TypeError as error:
        raise NotApplicableError(f"The schedule cannot be computed without the run: {error}") from error
    except ValueError as error:
        yield mistake(f"The schedule raised an error: {error}.")
        return
    if len(curve) == 1 and curve[0]:
        raise NotApplicableError("The run has no schedule, or one whose rates cannot be known before it.")
    create = getattr(probe.create_scheduler_fn, "func", probe.create_scheduler_fn)
    name, peak, updates = getattr(create, "__name__", str(create)).lower(), max(curve), len(curve)
    chosen = max(float(group.get("initial_lr", group.get("lr", 0.0))) for group in probe.trainer.optimizer.param_groups)
    small = next((number for number in range(curve.index(peak), updates) if curve[number] < 0.01 * peak), updates)
    lowest = min(curve[updates // 2 :])
    is_cyclic = any(kind in name for kind in ("cyclic", "restart", "lambda"))
    fallen = next((number for number in range(curve.index(peak), updates) if curve[number] < 0.1 * peak), updates)
    highest = max(curve[fallen:], default=0.0)
    rises = not is_cyclic and (curve[-1] > max(2 * lowest, 0.02 * peak) or highest > 0.5 * peak)
    is_fixed = len(set(curve)) == 1 and not any(kind in name for kind in ("constant", "lambda"))
    problems = {
        "is negative at times": min(curve) < 0,
        "is 0 in every update": peak == 0,
        f"is at most {peak:.3g}, that of the optimizer {chosen:.3g}": 0 < peak < 0.01 * chosen,
        "still rises at the end of the run: the warm-up never ends": updates >= 10 and curve.index(peak) == updates - 1,
        f"falls to {lowest:.3g} and rises again to {max(highest, curve[-1]):.3g}": updates >= 10 and rises,
        f"is below a hundredth of its peak, {peak:.3g}, from update {small}": updates >= 10 and small < 0.5 * updates,
        f"is {peak:.3g} in every update: the schedule never changes it": updates >= 10 and is_fixed,
    }
    problem = next((text for text, applies in problems.items() if applies), "")
    if problem:
        finding = mistake if min(curve) < 0 or peak == 0 else doubt
        text = f"The learning rate {problem}. The run has {updates} updates."
        yield finding(text, first=curve[0], highest=peak, last=curve[-1], updates=updates)


def check_learns(probe: Probe) -> Iterator[Finding]:
    """Train on a single small batch for up to 300 updates, with the highest learning rates of the run.

    A program that cannot fit a few samples cannot fit many.
    """
    optimizer = getattr(probe.trainer.optimizer, "optimizer", probe.trainer.optimizer)  # without Accelerate's wrapper
    if (
        probe.run.training_step.updates_one_by_one
        and isinstance(optimizer, CombinedOptimizer)
        and len(optimizer.parts) > 1
    ):
        raise NotApplicableError("The program has several optimizers, whose losses need not fall.")
    losses, of_torch = _fit(probe)
    before, after = _ends(losses)
    details = {"updates": len(losses), "before": before, "after": after}
    text = f"After {len(losses)} updates on one batch, its loss is {after:.4g}, from {before:.4g}"
    first, last = _ends(of_torch)
    scale = max(abs(before), 1e-6)
    if after < before and last > 1.2 * first + 0.1:
        text = f"{text}, but torch's loss functions give {last:.4g}, from {first:.4g}."
        yield mistake(text, "Look at the sign of the loss.", **details)
    elif before - after > 5e-3 * scale or abs(before) < 1e-4:
        # Targets that are shuffled in each update cannot be learnt. If the loss falls anyway, the program does not use
        # them.
        shuffled, _ = _fit(probe, len(losses), order=torch.Generator().manual_seed(0))
        is_told = shuffled != losses[: len(shuffled)]
        more = f", and {_ends(shuffled)[1]:.4g} with targets that are shuffled in each" if is_told else ""
        yield remark(f"{text}{more}.", **details, shuffled=_ends(shuffled)[1])
    elif len(losses) < 20:
        raise NotApplicableError(f"There was time for only {len(losses)} updates.")
    elif _SAMPLING & set(probe.watch_step(probe.batch).drawn):
        raise NotApplicableError("The step samples, as from a policy, whose loss need not fall.")
    else:
        yield from _try_other_rates(probe, text, not math.isfinite(after) or after - before > scale, details)


def _try_other_rates(probe: Probe, text: str, diverged: bool, details: Mapping[str, float]) -> Iterator[Finding]:
    factor = 1e-2 if diverged else max(100.0, 1e-3 / max([*probe.rates, 1e-12]))
    before, after = _ends(_fit(probe, factor=factor)[0])
    if math.isfinite(after) and before - after > 5e-2 * abs(before):
        advice = f"{'Lower' if diverged else 'Raise'} the learning rate; find_lr() suggests one."
        text = f"{text}; with {factor:g} times the learning rate it falls to {after:.4g}."
        yield (mistake if diverged else doubt)(text, advice, **details, factor=factor)
    else:
        advice = "Look at the gradients, at what the optimizer has, at zero_grad(), and at what is done between them."
        yield mistake(f"{text}, and {factor:g} times the learning rate does not help.", advice, **details)


def _ends(losses: list[float]) -> tuple[float, float]:
    """Return the mean losses of the first and of the last updates: a single loss may depend on random numbers."""
    first, before, after = losses[0], sum(losses[:3]) / len(losses[:3]), sum(losses[-5:]) / len(losses[-5:])
    return first if before > 3 * abs(first) else before, after  # the first update may have made the loss large


def _fit(
    probe: Probe, most: int = 300, factor: float = 1.0, order: torch.Generator | None = None
) -> tuple[list[float], list[float]]:
    """Train on one batch; return the losses of the updates, and the results of torch's loss functions in them.

    Args:
        factor: the factor for the learning rates
        order: a generator with which the targets are shuffled before each update
    """
    limit = probe.seconds_left - min(10.0, 0.3 * probe.seconds_left)
    losses: list[float] = []
    of_torch: list[float] = []
    with probe.training() as update:
        for group, rate in zip(probe.trainer.optimizer.param_groups, probe.rates, strict=False):
            set_option(group, "lr", rate * factor)
        while len(losses) < most and (probe.seconds_left > limit or not losses):
            result = update(probe.batch if order is None else _shuffled(probe.batch, order), len(losses))
            losses.append(result.loss)
            of_torch.append(sum(call.mean for call in result.watch.losses))
            before, after = _ends(losses)
            if order is None and before - after > _ENOUGH.get(len(losses), math.inf) * abs(before):
                break
    return losses, of_torch


def _shuffled(batch: Batch, order: torch.Generator) -> Batch:
    """Return a batch with its targets shuffled among the samples, if it is known which parts are targets."""
    rows = torch.randperm(batch.num_samples or 0, generator=order)
    return batch._replace(data=with_parts(batch.data, targets_of(batch, rows.tolist())))
