"""Path of warmup-stable-decay, as in pytorch-accelerated: see ``extensions/named_schedules/warmup_stable_decay.py``."""

from typing import TYPE_CHECKING

from pytorch_accel_lite.base.missing_extensions import missing_names_in
from pytorch_accel_lite.extensions.named_schedules import DECAYS, WSDLrScheduler, estimate_checkpoint_steps

__all__ = ["DECAYS", "WSDLrScheduler", "estimate_checkpoint_steps"]

if not TYPE_CHECKING:  # otherwise, a type checker would accept any name
    __getattr__ = missing_names_in("schedulers.wsd_scheduler")
