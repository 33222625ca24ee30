"""Choosing the training step of a run."""

from __future__ import annotations

from pytorch_accel_lite.base.modules import are_sharded
from pytorch_accel_lite.loop.step import PlainStep
from pytorch_accel_lite.run.state import Run, Step, TrainerLike
from pytorch_accel_lite.steps.combinations import find_features
from pytorch_accel_lite.steps.features import KINDS, Kind
from pytorch_accel_lite.steps.sharded import ShardedStep

_replaced: dict[Kind, Kind] = {}


def replace_step(kind: Kind, by: Kind) -> None:
    """Replace a kind of step in all runs by another kind, usually a subclass."""
    _replaced[kind] = by


def create_step(trainer: TrainerLike, run: Run) -> Step:
    """Create the training step of a run.

    Raises:
        ValueError: if the run uses features that do not work together, see ``.combinations``
    """
    features = find_features(trainer, run)
    if trainer.compiled_forward is not None:
        trainer.compiled_forward.begin_run(run)
    for kind in KINDS:
        if any(feature in features for feature in kind.features):
            return _replaced.get(kind, kind)(trainer, run)
    # Sharded weights are not a requested feature, so they choose a step only if no feature does.
    if are_sharded(trainer.model.parameters()) and run.ranks.world_size > 1:
        return ShardedStep(trainer, run)
    return PlainStep(trainer, run)
