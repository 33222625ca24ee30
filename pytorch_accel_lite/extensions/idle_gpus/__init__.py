"""Choosing idle GPUs on a machine that several people share."""

from pytorch_accel_lite.extensions.idle_gpus.idle_gpus import use_idle_gpus

__all__ = ["use_idle_gpus"]
