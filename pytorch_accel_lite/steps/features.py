"""Features of a training run and their conflicts. Each kind of step declares its features in its own file."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pytorch_accel_lite.run.run import Run, Step, TrainerLike


class Conflict(NamedTuple):
    """Another feature that a feature does not work with.

    Args:
        other: the feature that it does not work with
        reason: why they conflict, and what to do instead, as sentences without the first capital letter
    """

    other: Feature
    reason: str


class Feature(NamedTuple):
    """A feature of a run, as messages name it.

    Args:
        name: the name that messages show, with the arguments that ask for it
        is_used: returns whether a run of a trainer uses the feature
        own_conflicts: the features that this feature does not work with
        is_refused: whether a conflict is an error before training; otherwise the feature itself handles conflicts
        excludes: further conflicts, which the other features do not declare
    """

    name: str
    is_used: Callable[[TrainerLike, Run], bool]
    own_conflicts: tuple[Conflict, ...] = ()
    is_refused: bool = True
    excludes: tuple[Conflict, ...] = ()

    @property
    def conflicts(self) -> list[Conflict]:
        """All conflicts of the feature, including those that other features declare."""
        features = [feature for kind in STEP_KINDS for feature in kind.features]
        declared = [(feature, excluded) for feature in features for excluded in feature.excludes]
        return [*self.own_conflicts, *(Conflict(one, why) for one, (other, why) in declared if other is self)]

    def find_conflict(self, trainer: TrainerLike, run: Run) -> Conflict | None:
        """Return the first conflict of the feature in a run, or ``None``."""
        return next((conflict for conflict in self.conflicts if conflict.other.is_used(trainer, run)), None)


class StepKind(Protocol):
    """A kind of step: a subclass of ``Step``, with the features for which it replaces the plain step."""

    @property
    def features(self) -> tuple[Feature, ...]: ...  # noqa: D102
    def __call__(self, trainer: TrainerLike, run: Run) -> Step: ...  # noqa: D102


#: The kinds of steps that a run may ask for: ``.choice`` adds those of the core, an extension its own. Any two of them
#: conflict, so their order does not matter.
STEP_KINDS: list[StepKind] = []

# A feature with which several kinds of steps conflict, but that none of them provides.
SHARDED = Feature("sharded weights", lambda trainer, run: trainer.is_sharded)
FP16 = Feature("mixed_precision='fp16'", lambda trainer, run: trainer.accelerator.scaler is not None)

# Features of an extension, with which other kinds of steps conflict, too.
_OF_FAILED_BATCHES = (Conflict(SHARDED, "a step that fails on one process cannot be undone"),)
MICROBATCHES = Feature("auto_microbatch=True", lambda trainer, run: run.request.auto_microbatch, _OF_FAILED_BATCHES)
SKIPPED_BATCHES = Feature(
    "SkipFailedBatchesCallback", lambda trainer, run: run.request.skips_failed_batches, _OF_FAILED_BATCHES
)
