"""The factories that ``create_scheduler_fn="cosine"`` and the other names stand for: cases of ``WSDLrScheduler``."""

from __future__ import annotations

from functools import partial
from numbers import Integral

from pytorch_accel_lite.extending_schedulers import ScheduleName, TrainerPlaceholderValues, Unresolved, check_range
from pytorch_accel_lite.extensions.wsd.warmup_stable_decay import WSDLrScheduler


def schedule_by_name(name: ScheduleName, warmup_steps: float, interval: str) -> partial[WSDLrScheduler]:
    """Return the factory that a name stands for."""
    values = TrainerPlaceholderValues
    total: Unresolved = values.NUM_EPOCHS if interval == "epoch" else values.MAX_NUM_TRAIN_STEPS
    _check_warmup(warmup_steps, interval)
    warmup: Unresolved = round(warmup_steps * total) if 0 < warmup_steps < 1 else warmup_steps
    schedule = partial(WSDLrScheduler, total_steps=total, num_warmup_steps=warmup, lr_min=0.0)
    if name == "wsd":
        return partial(schedule, decay="sqrt", decay_phase_ratio=0.1)
    if name == "constant":
        return partial(schedule, decay_phase_ratio=0.0)
    return partial(schedule, decay=name, decay_phase_ratio=1 - values.min(warmup, total) / total)


def _check_warmup(warmup_steps: object, interval: str) -> None:
    """Check that the length of a warm-up is 0, a whole number of steps of the schedule, or a fraction of the run."""
    unit = "epochs" if interval == "epoch" else "updates"
    allowed = f"0, a whole number of {unit}, or a fraction of the run below 1"
    if check_range("warmup_steps", warmup_steps) >= 1 and not isinstance(warmup_steps, Integral):
        raise TypeError(f"warmup_steps={warmup_steps!r} must be {allowed}.")
