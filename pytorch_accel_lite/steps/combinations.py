"""Features of a run that do not work together, as each kind of step declares: errors, and a table for the docs."""

from __future__ import annotations

from pytorch_accel_lite.run.state import Run, TrainerLike
from pytorch_accel_lite.steps.closures import ReplayingStep
from pytorch_accel_lite.steps.compiled import CHECKPOINTED, COMPILED
from pytorch_accel_lite.steps.features import KINDS, Feature
from pytorch_accel_lite.steps.manual import ManualStep

KINDS.extend((ManualStep, ReplayingStep))


def all_features() -> list[Feature]:
    """Return all features that conflict with some others."""
    return [*(feature for kind in KINDS for feature in kind.features), COMPILED, CHECKPOINTED]


def find_features(trainer: TrainerLike, run: Run) -> list[Feature]:
    """Return the features that a run uses, except those that handle a conflict themselves.

    Raises:
        ValueError: if two of them do not work together, unless the feature itself handles the conflict
    """
    found = []
    for feature in [feature for feature in all_features() if feature.is_used(trainer, run)]:
        conflict = feature.find_conflict(trainer, run)
        if conflict is None:
            found.append(feature)
        elif feature.is_refused:
            raise ValueError(f"{feature.name} does not work with {conflict.other.name}: {conflict.reason}.")
    return found


def as_markdown() -> str:
    """Return the table of conflicts for the documentation."""
    pairs = [(feature, conflict) for feature in all_features() for conflict in feature.conflicts]
    rows = [f"| {feature.name} | {other.name} | {why} |" for feature, (other, why) in pairs]
    return "\n".join(["| feature | does not work with | because |", "|---|---|---|", *rows])
