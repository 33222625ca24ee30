"""Public path of the settings of a run."""

from pytorch_accel_lite.base.run_settings import RunRequest, TrainerRunConfig

__all__ = ["RunRequest", "TrainerRunConfig"]
