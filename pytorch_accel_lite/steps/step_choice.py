"""The choice of a run's training step, by the features that the run uses, which may not work together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import nn

from pytorch_accel_lite.base.missing_extensions import missing_extension_text
from pytorch_accel_lite.base.reachable_objects import codes_in
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.optimizers.optimizer_steps import needs_closure
from pytorch_accel_lite.run.run import Run, Step, TrainerLike
from pytorch_accel_lite.steps.plain_step import PlainStep


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
        yields: whether a run in which the feature has a conflict goes on without it; otherwise that is an error
        excludes: further conflicts, which the other features do not declare
        extension: the extension whose kind of step provides the feature, for the error if it is missing
    """

    name: str
    is_used: Callable[[TrainerLike, Run], bool]
    own_conflicts: tuple[Conflict, ...] = ()
    yields: bool = False
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


#: The kinds of steps that a run may ask for, which extensions add. A run has one of them.
STEP_KINDS: list[StepKind] = []
_replacements: dict[StepKind, StepKind] = {}


def replace_step(kind: StepKind, by: StepKind) -> None:
    """Replace a kind of step in all runs by another kind, usually a subclass."""
    _replacements[kind] = by


def create_step(trainer: TrainerLike, run: Run) -> Step:
    """Create the training step of a run, and let it start with the same values on all processes.

    Before, compilation is disabled if it does not work with the features that the run uses.

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
    asked_for_by = {kind: feature for kind in STEP_KINDS for feature in kind.features if feature in features}
    if len(asked_for_by) > 1:
        first, second, *_ = asked_for_by.values()
        raise ValueError(f"{first.name} does not work with {second.name}: a run has one kind of training step.")
    if asked_for_by:
        (kind,) = asked_for_by
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
    """Return the features that a run uses, except those that yield to others.

    Raises:
        ValueError: if two of them do not work together
    """
    found = []
    for feature in [feature for feature in all_features() if feature.is_used(trainer, run)]:
        conflict = feature.find_conflict(trainer, run)
        if conflict is None:
            found.append(feature)
        elif not feature.yields:
            raise ValueError(f"{feature.name} does not work with {conflict.other.name}: {conflict.reason}.")
    return found


# Features with which several kinds of steps conflict, but that none of them provides.
SHARDED = Feature("sharded weights", lambda trainer, run: trainer.is_sharded)
FP16 = Feature("mixed_precision='fp16'", lambda trainer, run: trainer.accelerator.scaler is not None)


def _recomputes_gradients(trainer: TrainerLike, run: Run) -> bool:
    """Whether the trainer's class says that updates recompute gradients. Only then are batches kept.

    If it says nothing: whether ``optimizer_step`` is overridden, and a method of the user's classes mentions
    ``recompute_gradients``.
    """
    if trainer.recomputes_gradients is not None:
        return trainer.recomputes_gradients
    if "optimizer_step" not in run.overridden:
        return False
    values = [
        value for base in type(trainer).__mro__ if not is_from_this_package(base) for value in vars(base).values()
    ]
    values.append(trainer.optimizer_step)  # which the user may have replaced in the object
    methods = [inspect.unwrap(getattr(value, "__func__", value)) for value in values]  # methods may be decorated
    codes = [method.__code__ for method in methods if hasattr(method, "__code__")]
    return any("recompute_gradients" in inner.co_names for code in codes for inner in codes_in(code))


# Features whose kinds of steps are in extensions. They are here, not there, for two reasons: kinds of steps declare
# conflicts with each other's features, but import no other extension; and a run that uses such a feature without its
# extension is refused before it trains, by an error that names the extension.
MANUAL = Feature(
    "an overridden train_step", lambda trainer, run: "train_step" in run.overridden, extension="manual_optimization"
)
CLOSURE = Feature(
    "an optimizer that needs a closure (LBFGS)",
    lambda trainer, run: bool(needs_closure(trainer.optimizer)),
    extension="closures",
)
RECOMPUTED = Feature("recompute_gradients()", _recomputes_gradients, yields=True, extension="closures")
MICROBATCHES = Feature(
    "auto_microbatch=True", lambda trainer, run: run.request.auto_microbatch, extension="failed_batches"
)
SKIPPED_BATCHES = Feature(
    "SkipFailedBatchesCallback", lambda trainer, run: run.request.skips_failed_batches, extension="failed_batches"
)
OF_EXTENSIONS = (MANUAL, CLOSURE, RECOMPUTED, MICROBATCHES, SKIPPED_BATCHES)


def _is_compiled(model: nn.Module) -> bool:
    return model._compiled_call_impl is not None or hasattr(model, "_orig_mod")


# Features of runs with any kind of step.
#: A conflict leads to a warning, and batches are computed without compilation.
COMPILED = Feature(
    "compile_step",
    lambda trainer, run: trainer.compiled_forward is not None,
    (
        Conflict(
            MANUAL,
            "it may update several times. Compile the networks that it calls with torch.compile, or the model with "
            "compile_model=True",
        ),
        Conflict(SHARDED, "compile the blocks of the model with compile_model='blocks'"),
    ),
    yields=True,
)
COMPILED_MODEL = Feature("compile_model=True", lambda trainer, run: _is_compiled(trainer.get_model()))
_AGAIN = (
    "within a larger graph, compiled code draws other random numbers when it is computed again, and changes buffers "
    "twice. Pass compile_model='blocks', which compiles the blocks one by one"
)
CHECKPOINTED = Feature(
    "activation_checkpointing",
    lambda trainer, run: trainer.activation_checkpointing is not False,
    (Conflict(COMPILED, _AGAIN), Conflict(COMPILED_MODEL, _AGAIN)),
)
