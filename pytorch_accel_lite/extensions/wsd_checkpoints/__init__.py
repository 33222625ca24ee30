"""The model before and after each decay of a warmup-stable-decay schedule."""

from pytorch_accel_lite.extensions.wsd_checkpoints.wsd_checkpoint_callback import WSDCheckpointCallback

__all__ = ["WSDCheckpointCallback"]
