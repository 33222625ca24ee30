"""Skipping batches that fail."""

from __future__ import annotations

from collections.abc import Collection
from typing import NotRequired

from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Failure, Phase
from pytorch_accel_lite.extension_tools.plain_types import StateDict

_PHASES = {"training", "evaluation", "prediction"}


class SkippedBatch(Failure):
    """A batch that has failed, with its phase and position."""

    phase: Phase
    epoch: int
    step: int
    dataset: NotRequired[str]


class SkipFailedBatchesCallback(TrainerCallback):
    """Skip batches that cannot be read or computed, and report them, in training and in other ``phases``.

    In training, all processes skip the batch together. The update uses the remaining batches of the accumulation
    window; if none remain, no update is made. Gradients, buffers and generators are as if the batch had never been
    tried. On several processes, gradients are averaged after the backward pass instead of during it.

    In an evaluation or a prediction, each process skips its own batches. Losses and metrics cover the other
    samples; the outputs of ``predict`` lack the rows of failed samples. At the end, a line says which samples were left
    out, and why. If all batches fail, an error is raised.

    Errors while reading a stream or your own loader still end the run.

    Args:
        max_failures: number of batches that may fail in a run; the next failure ends the run with its error. In an
            evaluation or a prediction, several processes count their failures at its end.
        phases: where batches are skipped: any of ``"training"``, ``"evaluation"`` and ``"prediction"``. Tests evaluate
            and predict.

    Attributes:
        failures: a dict for each failed batch of the run, or of ``evaluate`` or ``predict`` outside one, with
            ``phase``, ``epoch``, ``step``, ``rank``, the ``indices`` of its samples in the dataset (``None`` if
            unknown) and the ``error``; in an evaluation of several datasets also ``dataset``. Evaluations and
            predictions add failures when they end.
    """

    def __init__(self, max_failures: int = 10, *, phases: Collection[str] = ("training",)) -> None:
        self.max_failures = check_positive_int("max_failures", max_failures)
        are_names = isinstance(phases, Collection) and not isinstance(phases, str)
        if not are_names or not phases or not set(phases) <= set(_PHASES):
            raise ValueError(
                f"phases={phases!r} must be a tuple of one or more of 'training', 'evaluation' and 'prediction'."
            )
        self.phases = tuple(phases)
        self.failures: list[SkippedBatch] = []
        self._skipped_here = 0  # batches of this process in the current evaluation or prediction

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        request.skips_failed_batches |= "training" in self.phases
        request.skips_in_evaluation |= "evaluation" in self.phases
        request.skips_in_prediction |= "prediction" in self.phases

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self.failures = []
        self._skipped_here = 0

    def _begin_inference(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.outer is None:
            self.failures = []
        self._skipped_here = 0

    on_evaluation_run_start = on_predict_run_start = _begin_inference

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._skipped_here = 0

    def on_train_batch_skipped(
        self, trainer: TrainerLike, *, failures: list[Failure], error: BaseException | None, step: int, **kwargs: object
    ) -> None:
        epoch = trainer.progress.epoch
        for failure in failures:
            self.failures.append(_at("training", epoch, step, failure))
            samples = "" if failure["indices"] is None else f", samples {failure['indices']}"
            trainer.print(
                f"Batch skipped: epoch {epoch}, step {step}, process {failure['rank']}{samples}: {failure['error']}"
            )
        self._check_number(trainer, len(self.failures), error)

    def _skip_in_inference(self, trainer: TrainerLike, *, error: Exception, **kwargs: object) -> None:
        self._skipped_here += 1
        if trainer.ranks.world_size == 1:  # otherwise all count together in the end, so that none waits for this one
            self._check_number(trainer, len(self.failures) + self._skipped_here, error)

    on_eval_batch_skipped = on_predict_batch_skipped = _skip_in_inference

    def _end_inference(self, trainer: TrainerLike, **kwargs: object) -> None:
        skipped = trainer.run.skipped
        self._skipped_here = 0
        if skipped is None or not skipped.is_gathered:  # the prediction was not iterated to its end
            return
        name, epoch = trainer.run.data.eval_dataset_name, trainer.progress.epoch
        for batch in skipped.batches:
            failure = _at(skipped.phase, epoch, batch.step, batch.failure)
            if name:
                failure["dataset"] = name
            self.failures.append(failure)
        self._check_number(trainer, len(self.failures), skipped.first_error)

    on_eval_epoch_end = on_predict_run_end = _end_inference

    def _check_number(self, trainer: TrainerLike, number: int, error: BaseException | None) -> None:
        if number > self.max_failures:
            reason = f"More than max_failures={self.max_failures} batches have failed."
            trainer.print(reason)
            raise error or RuntimeError(f"{reason} Last failure: {self.failures[-1]}")

    def state_dict(self) -> StateDict:
        """Return the failures so far."""
        return {"failures": [dict(failure) for failure in self.failures]}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        self.failures = [{"phase": "training"} | failure for failure in state["failures"]]


def _at(phase: Phase, epoch: int, step: int, failure: Failure) -> SkippedBatch:
    rank, indices, error = failure["rank"], failure["indices"], failure["error"]
    return {"phase": phase, "epoch": epoch, "step": step, "rank": rank, "indices": indices, "error": error}
