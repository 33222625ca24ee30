"""Optuna: runs as trials of a study."""

from pytorch_accel_lite.extensions.optuna.pruning_callback import OptunaPruningCallback

__all__ = ["OptunaPruningCallback"]
