"""The factories that ``create_scheduler_fn="cosine"`` and the other names stand for: cases of ``WSDLrScheduler``."""

from __future__ import annotations

from functools import partial
from numbers import Integral

import torch

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_range, warn_outside
from pytorch_accel_lite.extension_tools.schedules import ScheduleName, TrainerPlaceholderValues, Unresolved
from pytorch_accel_lite.extensions.named_schedules.warmup_stable_decay import WSDLrScheduler, plan_period


def schedule_by_name(name: ScheduleName, warmup_steps: float, interval: str) -> partial[WSDLrScheduler]:
    """Return the factory that a name stands for."""
    values = TrainerPlaceholderValues
    total: Unresolved = values.NUM_EPOCHS if interval == "epoch" else values.MAX_NUM_TRAIN_STEPS
    _check_warmup(warmup_steps, interval)
    warmup: Unresolved = round(warmup_steps * total) if 0 < warmup_steps < 1 else warmup_steps

    class Schedule(partial[WSDLrScheduler]):
        """Shortens a warm-up that is too long, with a warning that names the argument of ``train()``."""

        def __call__(self, optimizer: torch.optim.Optimizer) -> WSDLrScheduler:
            planned = (self.keywords[key] for key in ("num_warmup_steps", "total_steps", "decay_phase_ratio"))
            return super().__call__(optimizer, num_warmup_steps=_shorten_warmup(warmup_steps, interval, *planned))

    schedule = partial(Schedule, WSDLrScheduler, total_steps=total, num_warmup_steps=warmup, lr_min=0.0)
    if name == "wsd":
        return schedule(decay="sqrt", decay_phase_ratio=0.1)
    if name == "constant":
        return schedule(decay_phase_ratio=0.0)
    return schedule(decay=name, decay_phase_ratio=1 - values.min(warmup, total) / total)


def _check_warmup(warmup_steps: object, interval: str) -> None:
    """Check that the length of a warm-up is 0, a whole number of steps of the schedule, or a fraction of the run."""
    unit = "epochs" if interval == "epoch" else "updates"
    allowed = f"0, a whole number of {unit}, or a fraction of the run below 1"
    if check_range("warmup_steps", warmup_steps) >= 1 and not isinstance(warmup_steps, Integral):
        raise TypeError(f"warmup_steps={warmup_steps!r} must be {allowed}.")


def _shorten_warmup(warmup_steps: float, interval: str, num_steps: int, total: int, decay_ratio: float) -> int:
    """Return the number of steps of a warm-up, which ends before the decay and within the run.

    Args:
        warmup_steps: the argument of ``train()``
        interval: ``"update"`` or ``"epoch"``: what a step of the schedule is
        num_steps: how many steps of the schedule that is
        total: the number of steps of the schedule
        decay_ratio: the part of the schedule in which the rate decays
    """
    period = plan_period(0, total, decay_ratio)
    limit = period["pre_decay_step"]
    if num_steps <= limit:
        return num_steps
    if period["decay_steps"]:
        problem = f"reaches into the decay, which starts after {_count(limit, interval)}"
    else:
        problem = f"is longer than the run, which has {_count(total, interval)}"
    length = "" if warmup_steps < 1 else f", in {interval}s,"
    warn_outside(f"warmup_steps={warmup_steps!r}{length} {problem}. It is shortened to {_count(limit, interval)}.")
    return limit


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"
