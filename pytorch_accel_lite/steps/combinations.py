"""Features of a training run that do not work together, from which errors and docs/combinations.md are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import NamedTuple

from torch import nn

from pytorch_accel_lite.base.inspection import is_ours, is_overridden
from pytorch_accel_lite.engine.run import Run, TrainerLike
from pytorch_accel_lite.optimizers import attributes
from pytorch_accel_lite.optimizers.operations import needs_closure, parts_of


class Feature(NamedTuple):
    """A feature of a run, as messages name it.

    :param is_used: whether a run of a trainer uses it
    """

    name: str
    is_used: Callable[[TrainerLike, Run], bool]


class Conflict(NamedTuple):
    """A feature that does not work with another one.

    :param reason: why, and what to do instead, as sentences without the first capital letter
    """

    feature: Feature
    other: Feature
    reason: str

    def __str__(self) -> str:
        return f"{self.feature.name} does not work with {self.other.name}: {self.reason}."


def _has_module(trainer: TrainerLike, matches: Callable[[nn.Module], bool]) -> bool:
    roots = [trainer.model, *attributes.modules(trainer).values()]
    return any(matches(module) for root in roots for module in root.modules())


def _names_recompute_gradients(trainer: TrainerLike, run: Run) -> bool:
    """Whether the user's methods mention it: only then are batches and generator states kept, which costs time."""
    if not is_overridden(trainer, "optimizer_step"):
        return False
    values = [value for base in type(trainer).__mro__ if not is_ours(base) for value in vars(base).values()]
    methods = [inspect.unwrap(getattr(value, "__func__", value)) for value in values]  # may be decorated
    codes = [getattr(method, "__code__", None) for method in methods]
    return any("recompute_gradients" in _names_in(code) for code in codes if code is not None)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


MICROBATCHES = Feature("auto_microbatch=True", lambda trainer, run: run.request.auto_microbatch)
SKIPPED_BATCHES = Feature("SkipFailedBatchesCallback", lambda trainer, run: run.request.skips_failed_batches)
MANUAL = Feature("an overridden train_step", lambda trainer, run: is_overridden(trainer, "train_step"))
CLOSURE = Feature(
    "an optimizer that needs a closure (LBFGS)", lambda trainer, run: bool(needs_closure(trainer.optimizer))
)
SEVERAL = Feature(
    "other optimizers, unless optimizer_step is overridden",
    lambda trainer, run: bool(parts_of(trainer.optimizer)) and not is_overridden(trainer, "optimizer_step"),
)
RECOMPUTED = Feature("recompute_gradients()", _names_recompute_gradients)
LOGICAL = Feature("logical_processes", lambda trainer, run: trainer.logical is not None)
COMPILED = Feature("compile_step", lambda trainer, run: trainer.compiled_forward is not None)
SHARDED = Feature("sharded weights", lambda trainer, run: trainer.is_sharded)
FP16 = Feature("mixed_precision='fp16'", lambda trainer, run: trainer.accelerator.scaler is not None)
SYNC_BATCH_NORM = Feature(
    "SyncBatchNorm", lambda trainer, run: _has_module(trainer, lambda module: isinstance(module, nn.SyncBatchNorm))
)
SPARSE = Feature(
    "sparse gradients (nn.Embedding(sparse=True))",
    lambda trainer, run: _has_module(
        trainer, lambda module: isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ),
)

_FAILS = "a step that fails on one process cannot be undone"
_UPDATES = "the updates of a failed step cannot be undone"
_ONE_LOSS = "only the gradients of one loss and one update can be computed again"
_UNSCALED = "its scaler unscales gradients once. Use bf16"
_NOT_KEPT = "the batches of an update are kept whole"

CONFLICTS = (
    Conflict(MICROBATCHES, SHARDED, _FAILS),
    Conflict(SKIPPED_BATCHES, SHARDED, _FAILS),
    Conflict(MANUAL, MICROBATCHES, _UPDATES),
    Conflict(MANUAL, SKIPPED_BATCHES, _UPDATES),
    Conflict(MANUAL, SHARDED, "it averages gradients itself, for whole weights"),
    *(
        Conflict(feature, other, reason)
        for feature in (CLOSURE, RECOMPUTED)
        for other, reason in (
            (MICROBATCHES, _NOT_KEPT),
            (SKIPPED_BATCHES, _NOT_KEPT),
            (FP16, _UNSCALED),
            (SHARDED, "gradients cannot be averaged again"),
            (MANUAL, _ONE_LOSS),
            (LOGICAL, "gradients are added over the logical processes once per update"),
        )
    ),
    Conflict(
        CLOSURE,
        SEVERAL,
        "it computes the gradients of an update several times. Give it alone, or step each part of trainer.optimizer "
        "in optimizer_step",
    ),
    Conflict(
        LOGICAL,
        MICROBATCHES,
        "where memory runs out, and so the last bits, would depend on the machine. Use more logical processes with "
        "smaller batches, of which one at a time is in memory",
    ),
    Conflict(
        LOGICAL,
        SKIPPED_BATCHES,
        "the shares before the one that fails are part of sums already. Let the dataset return another sample in place "
        "of one that cannot be read",
    ),
    Conflict(
        LOGICAL, SHARDED, "each process needs all weights. Replicate the model, or train without logical processes"
    ),
    Conflict(
        LOGICAL,
        MANUAL,
        "its updates would come before the gradients of other logical processes. Override calculate_train_batch_loss, "
        "which several optimizers can share",
    ),
    Conflict(LOGICAL, FP16, "its scaling depends on overflows of a process. Use bf16"),
    Conflict(LOGICAL, SYNC_BATCH_NORM, "it mixes the batches of real processes. Use BatchNorm, or GroupNorm"),
    Conflict(LOGICAL, SPARSE, "they have no fixed size to exchange. Use sparse=False"),
    Conflict(
        COMPILED,
        MANUAL,
        "it may update several times. Compile the networks that it calls with torch.compile, or the model with "
        "compile_model=True",
    ),
    Conflict(
        COMPILED, LOGICAL, "torch does not promise the same bits for compiled code, which logical processes promise"
    ),
    Conflict(COMPILED, SHARDED, "compile the blocks of the model in parallelize_model()"),
)


def find_conflict(feature: Feature, trainer: TrainerLike, run: Run) -> Conflict | None:
    """Return the first reason why a feature does not work in a run, or ``None``."""
    return next((c for c in CONFLICTS if c.feature is feature and c.other.is_used(trainer, run)), None)


def check_combinations(trainer: TrainerLike, run: Run) -> None:
    """Raise a ``ValueError`` for features that do not work together.

    Some are checked elsewhere: ``recompute_gradients`` raises an error when it is called, and ``compile_step`` warns.
    """
    for conflict in CONFLICTS:
        is_error = conflict.feature not in (RECOMPUTED, COMPILED)
        if is_error and conflict.feature.is_used(trainer, run) and conflict.other.is_used(trainer, run):
            raise ValueError(str(conflict))


def as_markdown() -> str:
    """Return the table of conflicts for the documentation."""
    rows = [f"| {c.feature.name} | {c.other.name} | {c.reason} |" for c in CONFLICTS]
    return "\n".join(["| feature | does not work with | because |", "|---|---|---|", *rows])
