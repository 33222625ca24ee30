"""Keeping the best model of a run."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.events import TrainerCallback

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


class SaveBestModelCallback(TrainerCallback):
    """Saves the model whenever a metric is better than before, and loads the best one at the end of the run.

    :param save_path: the file, usually ending in ``.pt``; see :meth:`Trainer.save_checkpoint`
    :param watch_metric: the name of the metric in the run history; its value is saved in the file, under its name
    :param greater_is_better: whether larger values are better
    :param reset_on_train: compare only with the values of the current training run
    :param save_optimizer: include the optimizer's state
    :param save_scheduler: include the scheduler's state
    :param load_saved_checkpoint: load the best model at the end of the run
    """

    def __init__(
        self,
        save_path: str | os.PathLike[str] = "best_model.pt",
        watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool = False,
        reset_on_train: bool = True,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        load_saved_checkpoint: bool = True,
    ) -> None:
        self.save_path = save_path
        self.watch_metric = watch_metric
        self.greater_is_better = greater_is_better
        self.reset_on_train = reset_on_train
        self.save_optimizer = save_optimizer
        self.save_scheduler = save_scheduler
        self.load_saved_checkpoint = load_saved_checkpoint
        self.best_metric: float | None = None
        self.best_metric_epoch: int | None = None

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        if self.reset_on_train:
            self.best_metric = self.best_metric_epoch = None

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        metric = float(trainer.run_history.get_latest_metric(self.watch_metric))
        if not self._is_better(metric):
            return
        epoch = trainer.run_history.current_epoch
        trainer.save_checkpoint(
            self.save_path,
            checkpoint_kwargs={self.watch_metric: metric, "epoch": epoch},
            save_optimizer=self.save_optimizer,
            save_scheduler=self.save_scheduler,
        )
        self.best_metric, self.best_metric_epoch = metric, epoch

    def _is_better(self, metric: float) -> bool:
        if math.isnan(metric):
            return False
        if self.best_metric is None:
            return True
        return metric > self.best_metric if self.greater_is_better else metric < self.best_metric

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:  # noqa: D102
        if not self.load_saved_checkpoint or self.best_metric is None:
            return
        trainer.print(
            f"Loading the best model: epoch {self.best_metric_epoch}, {self.watch_metric}: {self.best_metric:.6g}"
        )
        trainer.load_checkpoint(self.save_path)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its epoch."""
        return {"best_metric": self.best_metric, "best_metric_epoch": self.best_metric_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.best_metric = state["best_metric"]
        self.best_metric_epoch = state["best_metric_epoch"]
