"""The base class of callbacks that watch a metric."""

from __future__ import annotations

import operator
from collections.abc import Callable

from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.request_and_config import RunRequest
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.watched_metric import WatchedMetric


class MetricWatcher(TrainerCallback):
    """Calls ``_handle_value()`` once for each new value of a metric, also in a run that is killed and resumed.

    - a value of an evaluation within an epoch: at the checkpoint of the update that it follows; if a state was saved
      between the two, the resumed run handles it at the start of its first step (``_is_due``)
    - any other value: at the end of the epoch, after its evaluation
    """

    _is_due = False  # whether values of an evaluation within the epoch are still to be handled

    def __init__(self, watch_metric: str, greater_is_better: bool | None, reset_on_train: bool) -> None:
        self.watch_metric = watch_metric
        self.greater_is_better = greater_is_better
        self.reset_on_train = reset_on_train
        self.best_metric: float | None = None
        self._watched = WatchedMetric(self, "watch_metric", watch_metric, greater_is_better)

    @property
    def operator(self) -> Callable[[float, float], bool]:
        """The function that compares whether one value is better than another."""
        return operator.gt if self._watched.greater_is_better else operator.lt

    def _reset(self) -> None:
        """Forget the values of earlier runs."""
        raise NotImplementedError

    def _handle_value(self, trainer: TrainerLike, metric: float) -> None:
        """Handle a new value."""
        raise NotImplementedError

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        request.metrics.watch(self._watched)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._is_due = False
        self._watched.start(trainer)
        if self.reset_on_train:
            self._reset()

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._is_due:
            self._handle_new(trainer, mid_epoch=True)

    on_train_step_checkpoint = on_train_step_start

    def on_eval_epoch_end(self, trainer: TrainerLike, *, is_intermediate: bool = False, **kwargs: object) -> None:
        # The values of evaluate() within a run are not the run's own.
        self._is_due |= trainer.run.kind == "training"

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._handle_new(trainer, mid_epoch=False)

    def _handle_new(self, trainer: TrainerLike, mid_epoch: bool) -> None:
        self._is_due = False
        metric = self._watched.new_value(trainer, mid_epoch)
        if metric is not None:
            self._handle_value(trainer, metric)

    def state_dict(self) -> StateDict:
        """Return the metric, its best value, and whether a value is still to be handled."""
        return {**self._watched.state_dict(), "best_metric": self.best_metric, "is_due": self._is_due}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``, unless it belongs to another metric."""
        if self._watched.load_state_dict(state, self):
            self.best_metric = state["best_metric"]
            self._is_due = state.get("is_due", False)
            self._load_progress(state)

    def _load_progress(self, state: StateDict) -> None:
        """Load the further state of a subclass."""
