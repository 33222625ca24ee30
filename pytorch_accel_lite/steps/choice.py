"""Choosing the training step of a run."""

from __future__ import annotations

from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.modules import are_sharded
from pytorch_accel_lite.engine.run import Run, Step, TrainerLike
from pytorch_accel_lite.engine.step import PlainStep
from pytorch_accel_lite.optimizers.operations import needs_closure
from pytorch_accel_lite.steps import combinations
from pytorch_accel_lite.steps.closures import ReplayingStep
from pytorch_accel_lite.steps.failed_batches import GuardedStep
from pytorch_accel_lite.steps.logical_step import LogicalStep
from pytorch_accel_lite.steps.manual import ManualStep
from pytorch_accel_lite.steps.sharded import ShardedStep


def create_step(trainer: TrainerLike, run: Run) -> Step:
    """Create the training step of a run.

    :raises ValueError: if the run uses features that do not work together, see :mod:`.combinations`
    """
    combinations.check_combinations(trainer, run)
    if trainer.compiled_forward is not None:
        trainer.compiled_forward.begin_run(combinations.find_conflict(combinations.COMPILED, trainer, run))
    kind: type[Step] = PlainStep
    if trainer.logical is not None:
        kind = LogicalStep
    elif is_overridden(trainer, "train_step"):
        kind = ManualStep
    elif run.request.auto_microbatch or run.request.skips_failed_batches:
        kind = GuardedStep
    elif needs_closure(trainer.optimizer) or (
        combinations.RECOMPUTED.is_used(trainer, run)
        and combinations.find_conflict(combinations.RECOMPUTED, trainer, run) is None
    ):
        kind = ReplayingStep
    elif are_sharded(trainer.model.parameters()) and trainer.ranks.world_size > 1:
        kind = ShardedStep
    step: Step = kind(trainer, run)  # type: ignore[call-arg]
    return step
