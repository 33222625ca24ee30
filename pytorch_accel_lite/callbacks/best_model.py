"""Saving the best model of a run, and loading it at the end."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from pytorch_accel_lite.base.arguments import check_positive_int, checked_calls
from pytorch_accel_lite.base.display import escape_unprintable
from pytorch_accel_lite.base.paths import file_path
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.callbacks.metric_watcher import MetricWatcher
from pytorch_accel_lite.checkpoint.disk.checkpoint_files import read_checkpoint
from pytorch_accel_lite.checkpoint.disk.torch_files import load_plain
from pytorch_accel_lite.checkpoint.models.frozen_weights import check_has_trainable
from pytorch_accel_lite.checkpoint.models.supported_engines import refuse_engines, refuse_fsdp1
from pytorch_accel_lite.run.request_and_config import RunRequest
from pytorch_accel_lite.run.run import TrainerLike


@checked_calls("__init__")
class SaveBestModelCallback(MetricWatcher):
    """Save the model whenever a metric improves, and load the best one at the end of the run.

    Metrics of evaluations within an epoch (``intermediate_eval_loss``, or with ``evaluate_every``) are compared after
    the evaluation, values of other metrics at the end of the epoch.

    The best model is also loaded when a run is stopped or interrupted. If the run fails, or if the file is missing or
    has a better model from a killed attempt, the best model is not loaded, and a message names the file instead. A
    resumed run also warns of a missing file. Non-finite weights are never saved; they end the run with
    ``NonFiniteLossError``.

    Args:
        save_path: the checkpoint file, usually ending in ``.pt``; see ``Trainer.save_checkpoint()``
        watch_metric: name of the metric in the run history; its value is saved in the file under the same name. A
            training loss is a mean over an epoch in which the weights change; the weights at its end are saved. To
            choose by the loss of the saved weights, pass the training data as an ``eval_dataset``, too.
        greater_is_better: whether larger values are better; ``None`` uses what the metric declares, see
            ``MetricsCallback``. If it declares nothing, smaller values are better, with a warning unless it is a loss.
            A value that contradicts the metric raises an error.
        reset_on_train: compare only with values of the current training run
        save_optimizer: include the optimizer's state
        save_scheduler: include the scheduler's state
        load_saved_checkpoint: load the best model at the end of the run
        keep: number of best models to keep. If more than one, each is also saved with its epoch in the name, such as
            ``best_model-epoch0003.pt`` next to ``best_model.pt``, which is always the best; or, in a run that evaluates
            within epochs, with its update, such as ``best_model-update000000500.pt``. A second run with
            ``reset_on_train`` removes the files of the previous run, even from another program; without it, a callback
            that trains again keeps the better of two models of the same name.
        trainable_only: leave out frozen parameters of the model, such as those of a pretrained one with adapters, which
            must stay frozen during the run; see ``Trainer.save_model()``
    """

    _failed = False
    _is_of_earlier_run = False

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
        super().__init__(watch_metric, greater_is_better, reset_on_train)
        if watch_metric == "epoch":
            raise ValueError("watch_metric='epoch': files of models have an entry of this name. Rename the metric.")
        path = file_path("save_path", save_path, "a checkpoint")
        self.save_path = os.fspath(path) if isinstance(save_path, str) else path
        self.save_optimizer = save_optimizer
        self.save_scheduler = save_scheduler
        self.load_saved_checkpoint = load_saved_checkpoint
        self.keep = check_positive_int("keep", keep)
        self.trainable_only = trainable_only
        self._reset()

    def _reset(self) -> None:
        """Forget the best models of earlier runs."""
        self.best_metric = None
        self.best_metric_epoch: int | None = None
        self._kept: dict[str, float] = {}  # values of the kept models by epoch or update, best first

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        super().configure_run(trainer, request, **kwargs)
        request.claim_path(self, "save_path", self.save_path, "best model")

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._failed = False
        refuse_fsdp1(trainer.accelerator, "SaveBestModelCallback")
        if self.save_optimizer or self.load_saved_checkpoint:
            instead = "Pass save_optimizer=False and load_saved_checkpoint=False."
            refuse_engines(trainer.accelerator, "SaveBestModelCallback as it is", instead)
        metrics = trainer.run.request.metrics.directions
        if str(self.save_path) in metrics and trainer.ranks.rank == 0:
            warn_outside(
                f"SaveBestModelCallback(save_path={str(self.save_path)!r}) is named like a metric of the run, but "
                f"watches {self.watch_metric!r}. If you mean the metric, pass watch_metric={str(self.save_path)!r}."
            )
        if self.trainable_only:
            check_has_trainable(trainer.get_model())
            if trainer.run.request.unfreezes:
                raise ValueError(
                    "SaveBestModelCallback(trainable_only=True) leaves out frozen weights, but the run trains them "
                    "later (GradualUnfreezingCallback), so the best model could not be restored. Save it with "
                    "trainable_only=False."
                )
        super().on_training_run_start(trainer, **kwargs)
        self._is_of_earlier_run = self.best_metric is not None

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Handle the value because of which the run may have been stopped within an epoch."""
        if trainer.train_dataloader is not None and (self._is_due or trainer.run.epoch_is_trained):
            self._handle_new(trainer, mid_epoch=True)

    def _handle_value(self, trainer: TrainerLike, metric: float) -> None:
        """Save the model if its value is the best, or among the ``keep`` best."""
        epoch = trainer.run_history.current_epoch
        if self.keep > 1 and not math.isnan(metric):
            within_epochs = trainer.run.evaluates_within_epochs
            label = f"update{trainer.progress.update:09d}" if within_epochs else f"epoch{epoch:04d}"
            self._keep(trainer, metric, epoch, label)
        if self._watched.is_better(metric, self.best_metric):
            self._save(trainer, self.save_path, metric, epoch)
            self.best_metric = metric
            self.best_metric_epoch = epoch
            self._is_of_earlier_run = False

    def _save(self, trainer: TrainerLike, path: str | os.PathLike[str], metric: float, epoch: int) -> None:
        trainer.check_weights()
        trainer.save_checkpoint(
            path,
            checkpoint_kwargs={self.watch_metric: metric, "epoch": epoch},
            save_optimizer=self.save_optimizer,
            save_scheduler=self.save_scheduler,
            **({"trainable_only": True} if self.trainable_only else {}),
        )

    def _keep(self, trainer: TrainerLike, metric: float, epoch: int, label: str) -> None:
        """Save the model under its label if it is among the best, and remove models that no longer are."""
        if self._watched.is_better(metric, self._kept.get(label)):  # a second run has the same epoch numbers
            self._kept = self._watched.best_of(self._kept | {label: metric}, self.keep)
            if label in self._kept:
                path = Path(self.save_path)
                self._save(trainer, path.with_name(f"{path.stem}-{label}{path.suffix}"), metric, epoch)
        if trainer.accelerator.is_local_main_process:
            for existing, file in find_kept_models(self.save_path).items():
                if existing not in self._kept:
                    file.unlink(missing_ok=True)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self.best_metric is None and trainer.progress.epochs_completed:
            trainer.print(
                f"No best model was saved: {escape_unprintable(self.watch_metric)} never had a numeric value."
            )
        if not self.load_saved_checkpoint or self.best_metric is None:
            return
        best = self._describe_best(trainer)
        if self.watch_metric.removeprefix(trainer.run_history.metric_name_prefix).startswith("train_"):
            best += ", a mean over that epoch; the weights are those at its end"
        if self._failed:
            trainer.print(f"The run failed, so the best model is not loaded. It is in {str(self.save_path)!r}: {best}")
        elif not all(trainer.all_gather_object(self._is_in_file())):
            trainer.print(
                f"The best model is not in {str(self.save_path)!r}, which is missing or holds another attempt's. So "
                f"the model stays as the last epoch left it: {best}"
            )
        else:
            trainer.print(f"Loading the best model: {best}")
            if self._optimizer_fits(trainer):
                trainer.load_checkpoint(self.save_path)
            else:
                trainer.print("The optimizer stays as it is: its groups of parameters have changed since.")
                trainer.load_checkpoint(self.save_path, load_optimizer=False, load_scheduler=False)

    def _optimizer_fits(self, trainer: TrainerLike) -> bool:
        """Whether the optimizer in the file, if any, has as many parameters in each group as that of the trainer."""
        try:
            saved = load_plain(Path(self.save_path), mapped=True)["optimizer_state_dict"]["param_groups"]
        except (ValueError, KeyError, TypeError):  # the trainer writes other files
            return True
        now = getattr(trainer.optimizer, "param_groups", saved)
        return [len(group["params"]) for group in saved] == [len(group["params"]) for group in now]

    def _is_in_file(self) -> bool:
        """Whether the file exists and holds the best model, rather than the model of a killed attempt."""
        if not os.path.exists(self.save_path):
            return False
        try:
            checkpoint = load_plain(Path(self.save_path), mapped=True)
            return (checkpoint["epoch"], checkpoint[self.watch_metric]) == (self.best_metric_epoch, self.best_metric)
        except (ValueError, KeyError, TypeError):  # the trainer writes other files
            return True

    def _describe_best(self, trainer: TrainerLike | None = None) -> str:
        """Describe the best value, with its epoch in the run, although the history counts epochs over several runs."""
        value = f"{escape_unprintable(self.watch_metric)}: {self.best_metric:.6g} ({self._watched.direction})"
        assert self.best_metric_epoch is not None
        earlier = 0 if trainer is None else trainer.run_history.current_epoch - 1 - trainer.progress.epochs_completed
        if self._is_of_earlier_run or self.best_metric_epoch <= earlier:
            return f"epoch {self.best_metric_epoch} of an earlier run, {value}"
        return f"epoch {self.best_metric_epoch - earlier}, {value}"

    def on_exception(self, trainer: TrainerLike, *, exception: BaseException, **kwargs: object) -> None:
        self._failed = isinstance(exception, Exception)

    def find_saved(self) -> list[Path]:
        """Return the files of the best models that were saved, the best first."""
        best = Path(self.save_path)
        if not best.exists() or self.keep == 1:
            return [best] if best.exists() else []
        of_best = self._read_value(best)
        kept = {path: self._read_value(path) for path in find_kept_models(best).values()}
        # A best model that was saved with keep=1 has no copy with a label.
        copy = min((path for path, saved in kept.items() if saved == of_best), default=None)
        others = [path for path in kept if path != copy]
        return [best, *sorted(others, key=lambda path: (abs(kept[path][0] - of_best[0]), path.name))]

    def _read_value(self, path: Path) -> tuple[float, int | None]:
        """Return the value of a saved model, and its epoch, which a file that a program has written may lack."""
        checkpoint = read_checkpoint(path)
        return float(checkpoint[self.watch_metric]), checkpoint.get("epoch")

    def state_dict(self) -> StateDict:
        """Return the best value and its epoch, and the values of all kept models."""
        return {
            **super().state_dict(),
            "best_metric_epoch": self.best_metric_epoch,
            "kept": [[metric, label] for label, metric in self._kept.items()],
            "is_of_earlier_run": self._is_of_earlier_run,
        }

    def _load_progress(self, state: StateDict) -> None:
        """Load the best model's epoch and the kept models; warn if the file of the best model is missing."""
        self.best_metric_epoch = state["best_metric_epoch"]
        self._is_of_earlier_run = state.get("is_of_earlier_run", False)
        self._kept = {  # older states have epoch numbers as labels
            label if isinstance(label, str) else f"epoch{label:04d}": metric for metric, label in state["kept"]
        }
        if self.best_metric is not None and not os.path.exists(self.save_path):
            warn_outside(
                f"SaveBestModelCallback: save_path={str(self.save_path)!r} does not exist, but the resumed run has "
                f"saved its best model there: {self._describe_best()}. Copy it there before the run ends, or "
                "only an epoch that is even better will be saved and loaded."
            )


def find_kept_models(save_path: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the files of kept models, which are next to the best model, by labels such as ``epoch0003``."""
    path = Path(save_path)
    name = re.compile(rf"{re.escape(path.stem)}-(epoch\d{{4,}}|update\d{{9,}}){re.escape(path.suffix)}")
    return {match[1]: file for file in path.parent.glob("*") if (match := name.fullmatch(file.name))}
