"""Features of a training run and their conflicts. Each kind of step declares its own in its file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pytorch_accel_lite.base.reachable import codes_in
from pytorch_accel_lite.base.user_code import is_from_this_package, is_overridden
from pytorch_accel_lite.optimizers.optimizer_steps import needs_closure
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
        extension: the extension whose kind of step provides the feature, for the error if it is missing
    """

    name: str
    is_used: Callable[[TrainerLike, Run], bool]
    own_conflicts: tuple[Conflict, ...] = ()
    is_refused: bool = True
    excludes: tuple[Conflict, ...] = ()
    extension: str = ""

    def with_conflicts(self, *conflicts: Conflict) -> Feature:
        """Return the feature with its conflicts, for the kind of step that provides it."""
        return self._replace(own_conflicts=conflicts)

    @property
    def conflicts(self) -> list[Conflict]:
        """All conflicts of the feature, including those that other features declare."""
        features = [feature for kind in STEP_KINDS for feature in kind.features]
        declared = [(feature, excluded) for feature in features for excluded in feature.excludes]
        return [*self.own_conflicts, *(Conflict(one, why) for one, (other, why) in declared if other.name == self.name)]

    def find_conflict(self, trainer: TrainerLike, run: Run) -> Conflict | None:
        """Return the first conflict of the feature in a run, or ``None``."""
        return next((conflict for conflict in self.conflicts if conflict.other.is_used(trainer, run)), None)


class StepKind(Protocol):
    """A kind of step: a subclass of ``Step``, with the features for which it replaces the plain step."""

    @property
    def features(self) -> tuple[Feature, ...]: ...  # noqa: D102
    def __call__(self, trainer: TrainerLike, run: Run) -> Step: ...  # noqa: D102


#: The kinds of steps that a run may ask for, which extensions add. Any two of them conflict, so their order does not
#: matter.
STEP_KINDS: list[StepKind] = []

# Features with which several kinds of steps conflict, but that none of them provides.
SHARDED = Feature("sharded weights", lambda trainer, run: trainer.is_sharded)
FP16 = Feature("mixed_precision='fp16'", lambda trainer, run: trainer.accelerator.scaler is not None)


def _recomputes_gradients(trainer: TrainerLike, run: Run) -> bool:
    """Whether the trainer's class declares or seems to recompute gradients. Only then are batches kept."""
    declared = trainer.recomputes_gradients
    return _mentions_recompute_gradients(trainer) if declared is None else declared


def _mentions_recompute_gradients(trainer: TrainerLike) -> bool:
    """Whether ``optimizer_step`` is overridden, and a method of the user's classes mentions ``recompute_gradients``."""
    if not is_overridden(trainer, "optimizer_step"):
        return False
    values = [
        value for base in type(trainer).__mro__ if not is_from_this_package(base) for value in vars(base).values()
    ]
    methods = [inspect.unwrap(getattr(value, "__func__", value)) for value in values]  # methods may be decorated
    codes = [method.__code__ for method in methods if hasattr(method, "__code__")]
    return any("recompute_gradients" in inner.co_names for code in codes for inner in codes_in(code))


# Features of extensions, with which other kinds of steps conflict, too.
MANUAL = Feature(
    "an overridden train_step", lambda trainer, run: "train_step" in run.overridden, extension="manual_optimization"
)
CLOSURE = Feature(
    "an optimizer that needs a closure (LBFGS)",
    lambda trainer, run: bool(needs_closure(trainer.optimizer)),
    extension="closures",
)
RECOMPUTED = Feature("recompute_gradients()", _recomputes_gradients, is_refused=False, extension="closures")
MICROBATCHES = Feature(
    "auto_microbatch=True", lambda trainer, run: run.request.auto_microbatch, extension="failed_batches"
)
SKIPPED_BATCHES = Feature(
    "SkipFailedBatchesCallback", lambda trainer, run: run.request.skips_failed_batches, extension="failed_batches"
)
OF_EXTENSIONS = (MANUAL, CLOSURE, RECOMPUTED, MICROBATCHES, SKIPPED_BATCHES)
