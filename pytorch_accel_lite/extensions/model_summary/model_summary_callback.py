"""Printing torchinfo's table of the model with the first batch of a run."""

from __future__ import annotations

from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import set_own_listening
from pytorch_accel_lite.extension_tools.random_numbers import preserving_generators
from pytorch_accel_lite.extension_tools.runs_and_steps import inference
from pytorch_accel_lite.extensions.model_summary.layer_summary import summarise
from pytorch_accel_lite.utils import import_extra


class ModelSummaryCallback(TrainerCallback):
    """Print a summary of the model with the first batch of a run that is not resumed (extra ``summary``).

    The shapes come from an additional forward pass in evaluation mode, which changes nothing. See
    ``Trainer.summary()``.

    Args:
        depth: number of levels of nested modules to list
    """

    affects_training = False
    _is_due = False

    def __init__(self, depth: int = 3) -> None:
        self.depth = check_positive_int("depth", depth)
        import_extra("torchinfo", "summary", "ModelSummaryCallback")

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._is_due = not trainer.progress.update
        set_own_listening(trainer, self, self._is_due, "on_train_step_start")

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        set_own_listening(trainer, self, False, "on_train_step_start")
        batch, is_due, self._is_due = trainer.run.batch, self._is_due, False
        if is_due and batch is not None:
            with preserving_generators(), inference(trainer):
                trainer.print(summarise(trainer, batch.data, self.depth))
