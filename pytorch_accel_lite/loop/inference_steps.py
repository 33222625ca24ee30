"""The seam for evaluations and predictions in which batches may fail: an extension splits or skips these."""

from __future__ import annotations

from collections.abc import Callable

from pytorch_accel_lite.extension_names import missing_extension_text
from pytorch_accel_lite.run.parts import SkippedBatches
from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.state import InferenceStep, Run, TrainerLike

#: Creates what computes the batches of a run that may fail. An extension adds one.
INFERENCE_STEPS: list[Callable[[TrainerLike, Run], InferenceStep]] = []


def choose_inference_step(trainer: TrainerLike, run: Run, request: RunRequest) -> None:
    """Choose how a run computes the batches of its evaluations, or of its prediction.

    Raises:
        ValueError: if batches may fail, and the extension is missing
    """
    is_prediction = request.kind == "prediction"
    skips = request.skips_in_prediction if is_prediction else request.skips_in_evaluation
    splits = run.request.auto_microbatch
    run.skipped = SkippedBatches("prediction" if is_prediction else "evaluation") if skips else None
    run.inference_step = None
    if not INFERENCE_STEPS and (splits or skips or request.skips_failed_batches):
        wanted = "auto_microbatch=True" if splits else "Skipping batches that fail"
        raise ValueError(f"{wanted} {missing_extension_text('failed_batches')}")
    if skips or (splits and not is_prediction):
        run.inference_step = INFERENCE_STEPS[0](trainer, run)
