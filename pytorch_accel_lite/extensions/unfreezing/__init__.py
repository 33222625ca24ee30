"""Gradually unfreezing a pretrained model during a run, from its head downwards."""

from pytorch_accel_lite.extensions.unfreezing.gradual_unfreezing_callback import GradualUnfreezingCallback

__all__ = ["GradualUnfreezingCallback"]
