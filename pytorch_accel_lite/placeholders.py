"""Public path of values of a run for use in scheduler factories."""

from pytorch_accel_lite.schedulers.placeholders import (
    Placeholder,
    PlaceholderError,
    TrainerPlaceholderValues,
    replace_trainer_placeholder_values,
)

__all__ = ["Placeholder", "PlaceholderError", "TrainerPlaceholderValues", "replace_trainer_placeholder_values"]
