"""Features of a training run, and what each does not work with. A kind of step declares its own, in its file."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from pytorch_accel_lite.run.state import Run, Step, TrainerLike


class Conflict(NamedTuple):
    """Another feature, which a feature does not work with.

    :param reason: why, and what to do instead, as sentences without the first capital letter
    """

    other: Feature
    reason: str


class Feature(NamedTuple):
    """A feature of a run, as messages name it.

    :param is_used: whether a run of a trainer uses it
    :param conflicts: what it does not work with
    :param is_refused: whether a conflict is an error before training, rather than a matter of the feature itself
    """

    name: str
    is_used: Callable[[TrainerLike, Run], bool]
    conflicts: tuple[Conflict, ...] = ()
    is_refused: bool = True

    def find_conflict(self, trainer: TrainerLike, run: Run) -> Conflict | None:
        """Return the first reason why it does not work in a run, or ``None``."""
        return next((conflict for conflict in self.conflicts if conflict.other.is_used(trainer, run)), None)


class Kind(Protocol):
    """A kind of step: a subclass of ``Step``, with the features for which it takes the place of the plain step."""

    @property
    def features(self) -> tuple[Feature, ...]: ...  # noqa: D102
    def __call__(self, trainer: TrainerLike, run: Run) -> Step: ...  # noqa: D102


# What several kinds do not work with, and none provides.
SHARDED = Feature("sharded weights", lambda trainer, run: trainer.is_sharded)
FP16 = Feature("mixed_precision='fp16'", lambda trainer, run: trainer.accelerator.scaler is not None)
