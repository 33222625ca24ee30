"""Keeping an experiment's resolved file with its run, and in its training states."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import yaml

from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.checkpoint.files import try_lock
from pytorch_accel_lite.experiment.yaml_files import RESOLVED, short

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

#: Keys that may differ between a run and its continuation without a word.
_MAY_DIFFER = {"train.resume_from"}


class ExperimentRecord(TrainerCallback):
    """Writes the resolved file of an experiment into its ``output_dir``, and into each training state.

    A run that resumes prints what differs. While a run trains, no other may use its ``output_dir``.

    :param experiment: the experiment
    """

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment
        self._lock: Any = None
        self._is_main = True

    def __repr__(self) -> str:
        return f"ExperimentRecord({os.fspath(self._experiment.output_dir)!r})"

    def on_dataloaders_created(self, trainer: Trainer, **kwargs: Any) -> None:
        """Lock the folder."""
        if trainer.train_dataloader is not None:
            trainer.ranks.run_together(self._take_folder, only_first=True)

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Write the file."""
        path = self._experiment.output_dir / RESOLVED
        trainer.ranks.run_together(lambda: self._experiment.save(path), only_first=True)
        self._is_main = trainer.accelerator.is_main_process

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Leave the folder to others."""
        self._leave_folder()

    def on_exception(self, trainer: Trainer, **kwargs: Any) -> None:
        """Leave the folder to others."""
        self._leave_folder()

    def state_dict(self) -> dict[str, Any]:
        """Return the resolved file, for a training state."""
        return {"experiment": self._experiment.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Print what differs between the experiment that was saved and this one."""
        before = yaml.safe_load(state["experiment"])
        changes = [line for key, line in differences(before, self._experiment.config).items() if key not in _MAY_DIFFER]
        if changes and self._is_main:
            print("The experiment differs from the one that is resumed:", *changes, sep="\n  ")

    def _take_folder(self) -> None:
        folder = self._experiment.output_dir
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+")  # noqa: SIM115
        if not try_lock(file):
            file.close()
            raise RuntimeError(
                f"Another run is training in output_dir={os.fspath(folder)!r}. Wait for it, end it, or give this run "
                "another output_dir."
            )
        weakref.finalize(self, file.close)  # a run that fails before it begins never leaves the folder
        self._lock = file

    def _leave_folder(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def differences(before: Any, after: Any, key: str = "") -> dict[str, str]:
    """Return a line ``key: old -> new`` for each value that differs between two nested values, by key."""
    if isinstance(before, list) and isinstance(after, list):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if isinstance(before, dict) and isinstance(after, dict):
        result: dict[str, str] = {}
        for name in {**before, **after}:
            inner = f"{key}.{name}" if key else str(name)
            result |= differences(before.get(name), after.get(name), inner)
        return result
    return {} if before == after else {key: f"{short(key)}: {_brief(before)} -> {_brief(after)}"}


def _brief(value: Any) -> Any:
    """Return a value for a message; of a class and its arguments, the class."""
    return value["class_path"] if isinstance(value, dict) and "class_path" in value else value
