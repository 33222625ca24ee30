"""The factories that ``create_scheduler_fn="cosine"`` and the other names stand for: cases of ``WSDLrScheduler``."""

from __future__ import annotations

from functools import partial

from pytorch_accel_lite.extending_schedulers import (
    ScheduleName,
    TrainerPlaceholderValues,
    Unresolved,
    check_positive_int,
    check_range,
)
from pytorch_accel_lite.extensions.wsd.warmup_stable_decay import WSDLrScheduler


def schedule_by_name(name: ScheduleName, warmup_steps: float, interval: str) -> partial[WSDLrScheduler]:
    """Return the factory that a name stands for."""
    values = TrainerPlaceholderValues
    total: Unresolved = values.NUM_EPOCHS if interval == "epoch" else values.MAX_NUM_TRAIN_STEPS
    is_fraction = isinstance(warmup_steps, float) and warmup_steps < 1
    if is_fraction:
        check_range("warmup_steps", warmup_steps)
    elif warmup_steps:
        check_positive_int("warmup_steps", warmup_steps)
    warmup: Unresolved = round(warmup_steps * total) if is_fraction and warmup_steps else warmup_steps
    schedule = partial(WSDLrScheduler, total_steps=total, num_warmup_steps=warmup, lr_min=0.0)
    if name == "wsd":
        return partial(schedule, decay="sqrt", decay_phase_ratio=0.1)
    if name == "constant":
        return partial(schedule, decay_phase_ratio=0.0)
    return partial(schedule, decay=name, decay_phase_ratio=1 - values.min(warmup, total) / total)
