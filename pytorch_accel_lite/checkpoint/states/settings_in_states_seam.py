"""A seam: what training states record of the settings of a run, so that a resumed run can report changes."""

from __future__ import annotations

from collections.abc import Mapping

from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.base.types import JsonObject
from pytorch_accel_lite.run.run import TrainerLike, UserAttributes
from pytorch_accel_lite.run.training_state import TrainingState


class SettingsRecorder:
    """Records the settings of runs in training states, and describes which of them a resumed run has changed.

    This class records and describes nothing. An extension fills ``SETTINGS_RECORDER`` with one of a subclass that does.
    """

    def record(self, trainer: TrainerLike, reads_data: bool = True) -> JsonObject:
        """Return the settings of the current run.

        Args:
            reads_data: whether to read a few samples
        """
        return {}

    def compare(self, trainer: TrainerLike, state: TrainingState, now: JsonObject, attributes: UserAttributes) -> str:
        """Return how the settings in a state differ from those of the run that has loaded it, and which of both hold.

        Args:
            now: the settings that the run has recorded; afterwards, those that hold
            attributes: the users' attributes in states; afterwards, its ``compared`` has the arguments that differ
        """
        return ""

    def optimizer_options(self, trainer: TrainerLike) -> dict[str, str]:
        """Return the options of the optimizers by name, as texts."""
        return {}

    def describe_loaded(self, trainer: TrainerLike, before: Mapping[str, str], source: str) -> str:
        """Return which options of the optimizers a file or a state has changed; an empty text if none.

        Args:
            before: the result of ``optimizer_options()`` before loading
        """
        return ""


#: What records the settings of runs.
SETTINGS_RECORDER: Slot[SettingsRecorder] = Slot("recorded_settings")


def settings_recorder() -> SettingsRecorder:
    """Return what records the settings of runs, which records nothing if the extension is missing."""
    return SETTINGS_RECORDER.content or SettingsRecorder()
