"""Evaluating within an epoch by a callback; for ``train(evaluate_every=...)``, see ``loop/evaluation.py``."""

from __future__ import annotations

from pytorch_accel_lite.base.arguments import check_positive_int
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.request_and_config import RunRequest
from pytorch_accel_lite.run.run import TrainerLike


class StepBasedEvaluationCallback(TrainerCallback):
    """Evaluate every n optimizer updates, in addition to the evaluation after each epoch.

    Losses are recorded as ``intermediate_eval_loss``. To evaluate only at intervals, with losses recorded as
    ``eval_loss``, pass ``evaluate_every`` to ``train()`` instead. Training is unaffected: the final weights are bitwise
    the same as without these evaluations.

    Args:
        eval_every_n_steps: number of optimizer updates between evaluations
    """

    def __init__(self, eval_every_n_steps: int) -> None:
        self.eval_every_n_steps = check_positive_int("eval_every_n_steps", eval_every_n_steps)

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        request.metrics.within_epochs = True

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not trainer.eval_dataloaders:
            raise ValueError("StepBasedEvaluationCallback needs evaluation data. Pass eval_dataset to train().")

    def on_update_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.progress.update % self.eval_every_n_steps == 0:
            trainer.run_evaluation()
