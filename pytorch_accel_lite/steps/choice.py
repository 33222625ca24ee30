"""Choosing what takes the place of the plain training step."""

from __future__ import annotations

from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.optimizers.operations import needs_closure
from pytorch_accel_lite.steps.closures import begin_replay
from pytorch_accel_lite.steps.guarded import guarded_step
from pytorch_accel_lite.steps.manual import begin_own_step
from pytorch_accel_lite.steps.sharded import keep_replicas_equal


def choose_step(trainer: TrainerLike, run: Run) -> None:
    """Let what a run needs take the place of the plain step: shards, guards, the user's own step, logical processes.

    :raises ValueError: if two of them cannot be combined
    """
    request = run.request
    if trainer.ranks.world_size > 1:
        keep_replicas_equal(trainer, run)
    if request.auto_microbatch or request.skips_failed_batches:
        if trainer.is_sharded:
            raise ValueError(
                "auto_microbatch=True and SkipFailedBatchesCallback do not work with weights that are sharded by "
                f"{trainer.accelerator.distributed_type.value}: a step that fails on one process cannot be undone."
            )
        run.window.is_guarded = trainer.ranks.world_size > 1
        run.special_step = guarded_step
    if is_overridden(trainer, "train_step"):
        begin_own_step(trainer, run)
    if is_overridden(trainer, "optimizer_step") or needs_closure(trainer.optimizer):
        begin_replay(trainer, run)
    if trainer.logical is not None:
        trainer.logical.begin_training(trainer, run)
