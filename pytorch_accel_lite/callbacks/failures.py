"""Continuing when a batch fails."""

from __future__ import annotations

from typing import Any

from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.run_settings import RunRequest
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.engine.run import TrainerLike


class SkipFailedBatchesCallback(TrainerCallback):
    """Skip training batches that cannot be read or computed, on all processes together, and report them.

    The update uses the remaining batches of the accumulation window; if none remain, no update is made. Gradients,
    buffers and generators are as if the batch had never been tried. Batches of a stream or of your own loader must be
    readable.

    On several processes, gradients are averaged after the backward pass instead of during it.

    :param max_failures: number of batches that may fail in a run; the next failure ends the run with its error
    :ivar failures: a dict for each failed batch, with ``epoch``, ``step``, ``rank``, the ``indices`` of its samples in
        the dataset (``None`` if unknown) and the ``error``
    """

    def __init__(self, max_failures: int = 10) -> None:
        self.max_failures = check_positive_int("max_failures", max_failures)
        self.failures: list[dict[str, Any]] = []

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        request.skips_failed_batches = True

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.failures = []

    def on_train_batch_skipped(self, trainer: TrainerLike, **kwargs: Any) -> None:
        for failure in kwargs["failures"]:
            position = {"epoch": trainer.progress.epoch, "step": kwargs["step"]}
            self.failures.append(position | failure)
            samples = "" if failure["indices"] is None else f", samples {failure['indices']}"
            trainer.print(
                f"Batch skipped: epoch {position['epoch']}, step {position['step']}, process {failure['rank']}{samples}"
                f": {failure['error']}"
            )
        if len(self.failures) > self.max_failures:
            reason = f"More than max_failures={self.max_failures} batches have failed."
            trainer.print(reason)
            raise kwargs["error"] or RuntimeError(f"{reason} Last failure: {self.failures[-1]}")

    def state_dict(self) -> dict[str, Any]:
        """Return the failures so far."""
        return {"failures": [dict(failure) for failure in self.failures]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`."""
        self.failures = [dict(failure) for failure in state["failures"]]
