"""Searching for settings with Optuna: suggesting values from a search space, and repeating trials that were killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pytorch_accel_lite.utils import import_extra, result_of_first

#: The user attribute of a trial with the number of the killed trial that it continues.
_CONTINUES = "continues"


def suggest_overrides(
    trial: Any, space: Mapping[str, Mapping[str, Any]], folder: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Return overrides for ``Experiment.from_file()``, with values that an Optuna trial suggests.

    With several processes, call this function on each. All get the values that the first process draws.

    Args:
        trial: the trial; ``None`` on all processes but the first
        space: for each key, ``{"choices": [...]}``, or ``{"low": ..., "high": ...}`` with optional ``log`` and
            ``step``; if all these are integers, so are the values
        folder: folder of the search, in which each trial has an ``output_dir`` named by its number; a trial that
            continues a killed trial has the ``output_dir`` of that trial

    Raises:
        ValueError: if the space has anything else; names the key
    """

    def suggest() -> dict[str, Any]:
        values = {key: _suggest_value(trial, key, options) for key, options in space.items()}
        if folder is not None:
            number = trial.user_attrs.get(_CONTINUES, trial.number)
            values["output_dir"] = os.path.join(folder, str(number))
        return values

    return result_of_first(suggest)


def _suggest_value(trial: Any, key: str, options: Mapping[str, Any]) -> Any:
    names = set(options)
    if names == {"choices"}:
        return trial.suggest_categorical(key, options["choices"])
    numbers = [options[name] for name in names - {"log"}]
    if not {"low", "high"} <= names or not all(isinstance(number, (int, float)) for number in numbers):
        raise ValueError(f"space[{key!r}]={dict(options)!r} must have choices, or numbers for low and high.")
    is_integer = all(type(number) is int for number in numbers)
    return (trial.suggest_int if is_integer else trial.suggest_float)(key, **options)


def retry_killed_trials(study: Any) -> list[int]:
    """Make a study repeat the trials that were running when their program was killed, with the same values.

    With the ``folder`` of ``suggest_overrides()`` and ``"train.resume_from": "latest"``, each continues from its last
    training state. Call it before ``study.optimize``, while no other program runs trials of the study.

    Returns:
        the numbers of the trials that were killed

    Raises:
        ImportError: if Optuna is not installed (extra ``optuna``)
    """
    state = import_extra("optuna", "optuna", "retry_killed_trials()").trial.TrialState
    killed = study.get_trials(states=[state.RUNNING])
    for trial in killed:
        study.tell(trial.number, state=state.FAIL)
        study.enqueue_trial(trial.params, {_CONTINUES: trial.user_attrs.get(_CONTINUES, trial.number)})
    return [trial.number for trial in killed]
