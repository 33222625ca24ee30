"""Keeping the best model of a run."""

from __future__ import annotations

import math
import operator
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.other_libraries import answering
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.base.watched_metric import WatchedMetric
from pytorch_accel_lite.callbacks.unfreezing import GradualUnfreezingCallback
from pytorch_accel_lite.checkpoint.files import load_plain
from pytorch_accel_lite.checkpoint.weights import check_has_trainable

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest


_STEP_EVENTS = ("on_train_step_start", "on_train_step_checkpoint")


@answering
class SaveBestModelCallback(TrainerCallback):
    """Save the model whenever a metric improves, and load the best one at the end of the run.

    Metrics of evaluations within an epoch (``intermediate_eval_loss``, or with ``eval_every_n_epochs=None``) are looked
    at when they are made, others at the end of the epoch.

    The best model is also loaded when a run is stopped or interrupted. If a run fails, the model is left as it is, and
    a message says where the best one is; likewise if its file is missing, of which a resumed run warns, or holds the
    model of an attempt that was killed and, after a resume, was not surpassed. Non-finite
    weights are never saved; they end the run with :class:`~pytorch_accel_lite.NonFiniteLossError`.

    :param save_path: the checkpoint file, usually ending in ``.pt``; see :meth:`Trainer.save_checkpoint`
    :param watch_metric: name of the metric in the run history; its value is saved in the file under the same name
    :param greater_is_better: whether larger values are better; ``None`` asks the metric, see
        :class:`~pytorch_accel_lite.callbacks.MetricsCallback`. If the metric does not say, smaller values are better,
        with a warning unless it is a loss. A value that contradicts the metric raises an error.
    :param reset_on_train: compare only with values of the current training run
    :param save_optimizer: include the optimizer's state
    :param save_scheduler: include the scheduler's state
    :param load_saved_checkpoint: load the best model at the end of the run
    :param keep: number of best models to keep. If more than one, each is also saved with its epoch in the name, such as
        ``best_model-epoch0003.pt`` next to ``best_model.pt``, which is always the best. A second run with
        ``reset_on_train`` removes the files of the previous one, also if that was in another program; without it, the
        better of two epochs with the same number is kept.
    :param trainable_only: leave out frozen parameters of the model, such as those of a pretrained one with adapters,
        which must stay frozen during the run; see :meth:`Trainer.save_model`
    """

    _failed = False
    _is_due = False  # whether there was an evaluation within the epoch that has not been looked at
    _measured_at = -1  # samples seen when a metric was recorded last: none have changed the weights since, if still so

    def __init__(
        self,
        save_path: str | os.PathLike[str] = "best_model.pt",
        watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool | None = None,
        reset_on_train: bool = True,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        load_saved_checkpoint: bool = True,
        *,
        keep: int = 1,
        trainable_only: bool = False,
    ) -> None:
        self.save_path = save_path
        self.watch_metric = watch_metric
        self.greater_is_better = greater_is_better
        self.reset_on_train = reset_on_train
        self.save_optimizer = save_optimizer
        self.save_scheduler = save_scheduler
        self.load_saved_checkpoint = load_saved_checkpoint
        self.keep = check_positive_int("keep", keep)
        self.trainable_only = trainable_only
        self.best_metric: float | None = None
        self.best_metric_epoch: int | None = None
        self._kept: list[tuple[float, int]] = []  # metric and epoch, best first
        self._watched = WatchedMetric(self, "watch_metric", watch_metric, greater_is_better)

    @property
    def operator(self) -> Callable[[Any, Any], bool]:
        """The function that compares whether one value is better than another."""
        return operator.gt if self._watched.greater_is_better else operator.lt

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        if request.kind == "training":
            request.claim_path(self, "save_path", self.save_path, "best model")
            request.metrics.watch(self._watched)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._failed = self._is_due = False
        self._measured_at = -1
        self._listen_to_steps(trainer, True)
        if self.trainable_only:
            self._check_what_is_frozen(trainer)
        self._watched.start(trainer)
        if self.reset_on_train:
            self.best_metric = self.best_metric_epoch = None
            self._kept = []

    def _check_what_is_frozen(self, trainer: TrainerLike) -> None:
        check_has_trainable(trainer.get_model())
        if any(isinstance(callback, GradualUnfreezingCallback) for callback in trainer.callback_handler):
            raise ValueError(
                "SaveBestModelCallback(trainable_only=True) leaves out frozen weights, but GradualUnfreezingCallback "
                "trains them later, so the best model could not be restored. Save it with trainable_only=False."
            )

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._look_if_due(trainer)  # the resumed state was saved before this callback's turn

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._look_if_due(trainer)

    def _look_if_due(self, trainer: TrainerLike) -> None:
        """Look at an evaluation within the epoch, and listen to no more steps until the next."""
        is_due, self._is_due = self._is_due, False
        self._listen_to_steps(trainer, False)
        if is_due:
            self._look(trainer, mid_epoch=True)

    def _listen_to_steps(self, trainer: TrainerLike, listens: bool) -> None:
        own = [event for event in _STEP_EVENTS if not is_overridden(self, event)]
        trainer.callback_handler.set_listening(self, listens, *own)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._measured_at = trainer.progress.samples

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._measured_at = trainer.progress.samples
        self._is_due = "evaluation_loss" not in trainer.current_run.recorded_losses  # evaluate() returns what it finds
        self._listen_to_steps(trainer, True)

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        """Look at the value for which the run may have been stopped, before the end of the epoch."""
        if trainer.train_dataloader is not None and self._measured_at == trainer.progress.samples:
            self._look(trainer, mid_epoch=True)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._is_due = False
        self._look(trainer)

    def _look(self, trainer: TrainerLike, mid_epoch: bool = False) -> None:
        """Save the model if a new value of the metric is the best."""
        metric = self._watched.new_value(trainer, mid_epoch)
        if metric is None:
            return
        epoch = trainer.run_history.current_epoch
        if self.keep > 1 and not math.isnan(metric):
            self._keep(trainer, metric, epoch)
        if self._watched.is_better(metric, self.best_metric):
            self._save(trainer, self.save_path, metric, epoch)
            self.best_metric = metric
            self.best_metric_epoch = epoch

    def _save(self, trainer: TrainerLike, path: str | os.PathLike[str], metric: float, epoch: int) -> None:
        trainer.check_weights()
        trainer.save_checkpoint(
            path,
            checkpoint_kwargs={self.watch_metric: metric, "epoch": epoch},
            save_optimizer=self.save_optimizer,
            save_scheduler=self.save_scheduler,
            **({"trainable_only": True} if self.trainable_only else {}),
        )

    def _keep(self, trainer: TrainerLike, metric: float, epoch: int) -> None:
        """Save the model under its epoch if it is among the best, and remove those that no longer are."""
        greater = bool(self._watched.greater_is_better)
        ranking = sorted([*self._kept, (metric, epoch)], key=lambda kept: kept[0], reverse=greater)
        best_of_epoch: dict[int, float] = {}  # a second run's epochs share their numbers and files with the first's
        for value, number in ranking:
            best_of_epoch.setdefault(number, value)
        self._kept = [(value, number) for number, value in best_of_epoch.items()][: self.keep]
        if (metric, epoch) in self._kept:
            path = Path(self.save_path)
            self._save(trainer, path.with_name(f"{path.stem}-epoch{epoch:04d}{path.suffix}"), metric, epoch)
        kept = {number for _, number in self._kept}
        if trainer.accelerator.is_local_main_process:
            for number, file in find_kept_models(self.save_path).items():
                if number not in kept:
                    file.unlink(missing_ok=True)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self.best_metric is None and trainer.progress.epochs_completed:
            trainer.print(f"No best model was saved: {self.watch_metric} never had a numeric value.")
        if not self.load_saved_checkpoint or self.best_metric is None:
            return
        best = self._describe_best()
        path = str(self.save_path)
        if self._failed:
            trainer.print(f"The run failed, so the best model is not loaded. It is in {path!r}: {best}")
        elif not all(trainer.all_gather_object(self._is_in_file())):
            found = self._found() if os.path.exists(self.save_path) else None
            holds = "" if found is None else f", which holds epoch {found[0]} of another attempt ({found[1]})"
            trainer.print(
                f"The best model is not in {path!r}{holds}. So the model stays as the last epoch left it: {best}"
            )
        else:
            trainer.print(f"Loading the best model: {best}")
            trainer.load_checkpoint(self.save_path)

    def _is_in_file(self) -> bool:
        """Whether the file is there and holds the best model, rather than that of an attempt that was killed."""
        return os.path.exists(self.save_path) and self._found() in (None, (self.best_metric_epoch, self.best_metric))

    def _found(self) -> tuple[Any, Any] | None:
        """Return the epoch and the value that the file holds, or ``None`` if the trainer writes other files."""
        try:
            checkpoint = load_plain(Path(self.save_path), mapped=True)
            return checkpoint["epoch"], checkpoint[self.watch_metric]
        except (ValueError, KeyError, TypeError):
            return None

    def _describe_best(self) -> str:
        value = f"{self.watch_metric}: {self.best_metric:.6g}"
        return f"epoch {self.best_metric_epoch}, {value} ({self._watched.direction})"

    def on_exception(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._failed = isinstance(kwargs["exception"], Exception)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its epoch, and those of all kept models."""
        best = {"best_metric": self.best_metric, "best_metric_epoch": self.best_metric_epoch}
        kept = [list(kept) for kept in self._kept]
        return {**self._watched.state_dict(), **best, "kept": kept, "is_due": self._is_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`, unless it belongs to another metric."""
        if self._watched.load_state_dict(state, self):
            self.best_metric = state["best_metric"]
            self.best_metric_epoch = state["best_metric_epoch"]
            self._kept = [(metric, epoch) for metric, epoch in state["kept"]]
            self._is_due = state.get("is_due", False)
            if self.best_metric is not None and not os.path.exists(self.save_path):
                warnings.warn(
                    f"SaveBestModelCallback: save_path={str(self.save_path)!r} does not exist, but the resumed run has "
                    f"saved its best model there: {self._describe_best()}. Copy it there before the run ends, or "
                    "only an epoch that is even better will be saved and loaded.",
                    stacklevel=2,
                )


def find_kept_models(save_path: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the files of the best models next to that of the best one, by epoch."""
    path = Path(save_path)
    name = re.compile(rf"{re.escape(path.stem)}-epoch(\d{{4,}}){re.escape(path.suffix)}")
    return {int(match[1]): file for file in path.parent.glob("*") if (match := name.fullmatch(file.name))}
