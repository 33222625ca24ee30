"""Path of warmup-stable-decay, as in pytorch-accelerated: see ``extensions/named_schedules/warmup_stable_decay.py``."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.extensions.named_schedules import DECAYS, WSDLrScheduler, estimate_checkpoint_steps

__all__ = ["DECAYS", "WSDLrScheduler", "estimate_checkpoint_steps"]

add_missing_name_errors(__name__)
