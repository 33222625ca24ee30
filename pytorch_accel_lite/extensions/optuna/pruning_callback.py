"""Pruning unpromising trials of an Optuna study."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from pytorch_accel_lite.extending import RunRequest, StopTrainingError, TrainerCallback, TrainerLike, WatchedMetric
from pytorch_accel_lite.utils import import_extra

_PATHS = "paths"  # the user attribute of a trial with the paths that it writes to


class OptunaPruningCallback(TrainerCallback):
    """Report a metric to an Optuna trial after each epoch, and stop the run early if the trial is to be pruned.

    All callbacks still handle the end of the epoch, so models and states are saved. Call ``check_pruned()`` after
    ``train``. A trial that resumes from a training state also reports the values of the epochs before it. The study
    determines whether greater values are better.

    Args:
        trial: the trial; ``None`` on all processes but the first
        metric: name, in the run history, of the metric that is the objective of the study

    Attributes:
        is_pruned: whether the run was ended because the trial is to be pruned

    Raises:
        ImportError: if Optuna is not installed (extra ``optuna``)
        ValueError: before a run, if the study maximises a metric of which smaller values are known to be better, or the
            reverse; or if a callback writes to a path to which another trial of the study has written
    """

    affects_training = False

    def __init__(self, trial: Any, metric: str = "eval_loss_epoch") -> None:
        self._optuna = import_extra("optuna", "optuna", "OptunaPruningCallback")
        self.trial = trial
        self.metric = metric
        self.is_pruned = False
        self._watched = WatchedMetric(self, "metric", metric)

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        """Require the metric, in the direction of the study."""
        if request.kind == "training":
            self.is_pruned = False
            maximises = trainer.ranks.result_of_first(self._maximises)
            remedy = "Create the study with the other direction."
            self._watched = WatchedMetric(self, "metric", self.metric, maximises, remedy)
            request.metrics.watch(self._watched)
        self._request = request

    def _maximises(self) -> bool | None:
        """Return whether the study maximises the metric; ``None`` without a study, as for a FixedTrial."""
        study = getattr(self.trial, "study", None)
        return None if study is None else study.direction == self._optuna.study.StudyDirection.MAXIMIZE

    def on_dataloaders_created(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Check that no other trial writes to the same paths."""
        if self._request.kind == "training":
            trainer.ranks.run_together(self._check, only_first=True)

    def _check(self) -> None:
        study = getattr(self.trial, "study", None)  # a FixedTrial has no study
        if study is None:
            return
        paths = sorted(path if "://" in path else os.path.realpath(path) for path in self._request.paths)
        self.trial.set_user_attr(_PATHS, paths)  # first, as other trials may start now
        failed = self._optuna.trial.TrialState.FAIL
        for other in study.get_trials(deepcopy=False):
            shared = [path for path in paths if path in other.user_attrs.get(_PATHS, ())]
            if shared and other.number != self.trial.number and other.state != failed:
                raise ValueError(
                    f"Trial {self.trial.number} would write to {shared[0]!r}, but that belongs to trial {other.number} "
                    "of the study. Give each trial its own folder: suggest_overrides(trial, space, 'runs/search') "
                    "does. To continue a trial that was killed, call retry_killed_trials(study) first."
                )

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Report the values of the epochs before the resumed epoch."""
        self._watched.start(trainer)
        history = trainer.run_history
        if trainer.progress.update and hasattr(history, "curves") and self.metric in history:
            epochs, values = history.curves([self.metric])[self.metric]
            earlier = dict(zip(epochs, map(float, values), strict=True))
            trainer.ranks.run_together(lambda: self._report_all(earlier), only_first=True)

    def _report_all(self, values: Mapping[int, float]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The reported value is ignored")  # for epochs that are reported twice
            for epoch, value in values.items():
                self.trial.report(value, epoch)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Report the value of the epoch, and end the run on all processes if the trial is to be pruned."""
        value = self._watched.new_value(trainer)
        if value is None:
            return
        epoch = trainer.progress.epoch
        self.is_pruned = trainer.ranks.result_of_first(lambda: self._report(value, epoch))
        if self.is_pruned:
            raise StopTrainingError(f"Optuna prunes this trial: {self.metric} {value:.6g} in epoch {epoch}.")

    def _report(self, value: float, epoch: int) -> bool:
        self._report_all({epoch: value})  # an epoch repeated after a kill is reported twice
        return bool(self.trial.should_prune())

    def check_pruned(self) -> None:
        """Tell the study that the trial was pruned. Call it after ``train``.

        Raises:
            optuna.TrialPruned: if the trial was pruned
        """
        if self.is_pruned:
            raise self._optuna.TrialPruned

    def state_dict(self) -> dict[str, Any]:
        """Return which values have been reported, and whether the trial was pruned."""
        return {**self._watched.state_dict(), "is_pruned": self.is_pruned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by ``state_dict()``."""
        if self._watched.load_state_dict(state, self):
            self.is_pruned = state.get("is_pruned", False)
