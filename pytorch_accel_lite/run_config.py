"""Public path of the settings of a run."""

from pytorch_accel_lite.run.request_and_config import RunRequest, TrainerRunConfig

__all__ = ["RunRequest", "TrainerRunConfig"]
