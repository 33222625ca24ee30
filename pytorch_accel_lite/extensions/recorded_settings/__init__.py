"""Settings of runs in training states: a resumed run prints which of them the program has changed, and what holds."""

from pytorch_accel_lite.extending import SETTINGS_RECORDER
from pytorch_accel_lite.extensions.recorded_settings.changed_since_saved import ComparedSettings

__all__ = ["ComparedSettings"]

SETTINGS_RECORDER.fill(ComparedSettings())
