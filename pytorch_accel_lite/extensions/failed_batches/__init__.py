"""Batches that fail: they are skipped, or split until they fit into memory, in training and without it."""

from pytorch_accel_lite.extending import INFERENCE_STEP, STEP_KINDS
from pytorch_accel_lite.extensions.failed_batches.guarded_inference import GuardedInference
from pytorch_accel_lite.extensions.failed_batches.guarded_step import GuardedStep
from pytorch_accel_lite.extensions.failed_batches.skip_failed_batches_callback import SkipFailedBatchesCallback

__all__ = ["GuardedInference", "GuardedStep", "SkipFailedBatchesCallback"]

INFERENCE_STEP.fill(GuardedInference)
STEP_KINDS.append(GuardedStep)
