"""The loss scale and the skipped updates of a gradient scaler."""

from __future__ import annotations

from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.plain_types import StateDict


class LossScaleCallback(TrainerCallback):
    """Record the loss scale and the skipped updates of the gradient scaler (fp16); without a scaler, record nothing.

    Recorded per epoch: ``loss_scale`` at its end, and the number of ``skipped_updates``; per update, ``loss_scale``.
    The scale is read from the device after each update, for which a scaler waits anyway.
    """

    affects_training = False

    def __init__(self) -> None:
        self._skipped_before = 0  # updates of the run, before this epoch

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        if trainer.accelerator.scaler is not None and request.kind == "training":
            request.metrics.record(self, ("loss_scale", "skipped_updates"))

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._skipped_before = trainer.run.training_step.skipped_updates

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.accelerator.scaler is not None:
            trainer.step_metrics["loss_scale"] = trainer.accelerator.scaler.get_scale()

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        scaler = trainer.accelerator.scaler
        if scaler is not None:
            trainer.run_history.update_metric("loss_scale", scaler.get_scale())
            skipped = trainer.run.training_step.skipped_updates - self._skipped_before
            trainer.run_history.update_metric("skipped_updates", skipped)

    def state_dict(self) -> StateDict:
        """Return the number of skipped updates before the epoch."""
        return {"skipped_before": self._skipped_before}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        # States of 0.2 have the count of the epoch so far, but none of the run, which therefore begins at 0.
        self._skipped_before = state["skipped_before"] if "skipped_before" in state else -state["skipped"]
