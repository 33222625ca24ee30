"""Advice after the first epoch of a run: a default callback."""

from pytorch_accel_lite.extension_tools.metrics_and_callbacks import DEFAULTS
from pytorch_accel_lite.extensions.advice.advice_callback import AdviceCallback

__all__ = ["AdviceCallback"]

DEFAULTS.append(AdviceCallback)  # the last: it is printed below what the others show of the epoch
