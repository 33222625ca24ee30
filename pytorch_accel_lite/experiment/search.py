"""Searching for settings with Optuna: values from a search space, and pruning of trials that do badly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.events import StopTrainingError, TrainerCallback
from pytorch_accel_lite.utils import import_extra
from pytorch_accel_lite.watching import WatchedMetric

if TYPE_CHECKING:
    from pytorch_accel_lite.run_config import RunRequest
    from pytorch_accel_lite.trainer import Trainer


class OptunaPruningCallback(TrainerCallback):
    """Report a metric to an Optuna trial after each epoch, and end the run in order if the trial is to be pruned.

    All callbacks run to their end, so models and states are saved. Call :meth:`check_pruned` after ``train``.

    :param trial: the trial; ``None`` on all processes but the first
    :param metric: name of the metric in the run history, the objective of the study
    :ivar is_pruned: whether the run was ended because the trial is to be pruned
    :raises ImportError: if Optuna is not installed (extra ``optuna``)
    :raises ValueError: at the start of a run, if the study maximises a metric of which smaller values are better, or
        the reverse
    """

    def __init__(self, trial: Any, metric: str = "eval_loss_epoch") -> None:
        self._optuna = import_extra("optuna", "optuna", "OptunaPruningCallback")
        self.trial = trial
        self.metric = metric
        self.is_pruned = False
        self._watched = WatchedMetric(self, "metric", metric)

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        """Require the metric."""
        if request.kind == "training":
            request.metrics.watch(self._watched)

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check the direction of the study."""
        self.is_pruned = False
        self._watched.start(trainer)
        trainer.ranks.run_together(self._check_direction, only_first=True)

    def _check_direction(self) -> None:
        study = getattr(self.trial, "study", None)  # a FixedTrial has none
        if study is None:
            return
        maximises = study.direction == self._optuna.study.StudyDirection.MAXIMIZE
        if maximises != bool(self._watched.greater_is_better):
            raise ValueError(
                f"The study {'maximises' if maximises else 'minimises'}, but metric={self.metric!r} is better the "
                f"{'smaller' if maximises else 'larger'} it is. Create the study with "
                f"direction={'minimize' if maximises else 'maximize'!r}."
            )

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Report the value of the epoch, and end the run on all processes if the trial is to be pruned."""
        value = self._watched.new_value(trainer)
        if value is None:
            return
        epoch = trainer.progress.epoch
        self.is_pruned = trainer.ranks.broadcast_object(lambda: self._report(value, epoch))
        if self.is_pruned:
            raise StopTrainingError(f"Optuna prunes this trial: {self.metric} {value:.6g} in epoch {epoch}.")

    def _report(self, value: float, epoch: int) -> bool:
        self.trial.report(value, epoch)
        return bool(self.trial.should_prune())

    def check_pruned(self) -> None:
        """Tell the study that the trial was pruned. Call it after ``train``.

        :raises optuna.TrialPruned: if it was
        """
        if self.is_pruned:
            raise self._optuna.TrialPruned

    def state_dict(self) -> dict[str, Any]:
        """Return which values have been reported."""
        return self._watched.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`, so that a trial that resumes reports only new values."""
        self._watched.load_state_dict(state, self)


def suggest_overrides(trial: Any, space: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return overrides for :meth:`Experiment.from_file`, with values that an Optuna trial suggests.

    :param space: by key, ``{"choices": [...]}``, or ``{"low": ..., "high": ...}`` with optional ``log`` and ``step``;
        two integers give integers
    :raises ValueError: for anything else; names the key
    """
    return {key: _suggest(trial, key, range_of) for key, range_of in space.items()}


def _suggest(trial: Any, key: str, range_of: Mapping[str, Any]) -> Any:
    names = set(range_of)
    if names == {"choices"}:
        return trial.suggest_categorical(key, range_of["choices"])
    if not {"low", "high"} <= names <= {"low", "high", "log", "step"}:
        raise ValueError(f"space[{key!r}]={dict(range_of)!r} must have choices, or low and high, with log or step.")
    ends = range_of["low"], range_of["high"]
    suggest = trial.suggest_int if all(type(end) is int for end in ends) else trial.suggest_float
    return suggest(key, *ends, **{name: range_of[name] for name in names - {"low", "high"}})
