"""The choice of a run's training step among the kinds of steps, and the features that do not work together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytorch_accel_lite.extension_names import missing_extension_text
from pytorch_accel_lite.run.run import Run, Step, TrainerLike
from pytorch_accel_lite.steps.compilation import CHECKPOINTED, COMPILED
from pytorch_accel_lite.steps.features import OF_EXTENSIONS, STEP_KINDS, Feature, StepKind
from pytorch_accel_lite.steps.plain_step import PlainStep

_replacements: dict[StepKind, StepKind] = {}


def replace_step(kind: StepKind, by: StepKind) -> None:
    """Replace a kind of step in all runs by another kind, usually a subclass."""
    _replacements[kind] = by


def create_step(trainer: TrainerLike, run: Run) -> Step:
    """Create the training step of a run, and let it start with the same values on all processes.

    Raises:
        ValueError: if the run uses features that do not work together, or of an extension that is missing
    """
    features = find_features(trainer, run)
    if trainer.compiled_forward is not None and (conflict := COMPILED.find_conflict(trainer, run)):
        trainer.compiled_forward.disable(f"with {conflict.other.name}, {conflict.reason}")
    step = _choose_kind(trainer, run, features)(trainer, run)
    step.begin_replicas(trainer, run)
    return step


def _choose_kind(trainer: TrainerLike, run: Run, features: Sequence[Feature]) -> Callable[[TrainerLike, Run], Step]:
    """Return the kind of step for the features that a run uses."""
    for kind in STEP_KINDS:
        if any(feature in features for feature in kind.features):
            return _replacements.get(kind, kind)
    for feature in features:
        if feature.extension:
            raise ValueError(f"{feature.name} {missing_extension_text(feature.extension)}")
    # Sharded weights are not a requested feature, so they choose a step only if no feature does.
    return PlainStep if run.sharding is None else run.sharding.choose_step(trainer, run)


def all_features() -> list[Feature]:
    """Return all features that conflict with some others, in the order of their definitions."""
    found = {feature.name: feature for feature in OF_EXTENSIONS}
    found |= {feature.name: feature for kind in STEP_KINDS for feature in kind.features}
    return [*found.values(), COMPILED, CHECKPOINTED]


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
