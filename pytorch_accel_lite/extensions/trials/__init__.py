"""Training on a few batches without a trace: trials, and users' callbacks in them."""

from __future__ import annotations

from pytorch_accel_lite.extensions.trials.trial import Trial
from pytorch_accel_lite.extensions.trials.user_callbacks import UserCallbacks

__all__ = ["Trial", "UserCallbacks"]
