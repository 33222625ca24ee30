"""Watching a metric of a run: its newest value, its direction, and whether it has been recorded."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable
from typing import TypeVar

from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.unknown_names import did_you_mean
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.run.history import MetricValue, RunHistory
from pytorch_accel_lite.run.run import TrainerLike

Key = TypeVar("Key")


def is_loss(name: str) -> bool:
    """Whether a metric is a loss by its name: a word that ends with "loss", as in "eval_loss_epoch" and "logloss"."""
    words = re.findall("[A-Z]?[a-z]+|[A-Z]+", name)
    return any(re.search("(?<!^[gf])loss(es)?$", word.lower()) for word in words)


def direction_in_words(greater_is_better: bool | None) -> str:
    """Return the direction of a metric for a message."""
    return "greater is better" if greater_is_better else "smaller is better"


def improvement(value: float, on: float | None, greater_is_better: bool | None) -> float:
    """Return by how much a value is better than another one; negative if it is worse, NaN if either is.

    Args:
        on: the other value; ``None`` if there is none yet, on which any finite value is an improvement
    """
    if on is None:
        return math.inf if math.isfinite(value) else -math.inf
    return value - on if greater_is_better else on - value


def best_first(items: Iterable[tuple[Key, float]], greater_is_better: bool | None) -> list[tuple[Key, float]]:
    """Return values with their names, the best one first."""
    return sorted(items, key=lambda item: item[1], reverse=bool(greater_is_better))


class WatchedMetric:
    """Returns each value of a metric once. Epochs without an evaluation have no value.

    Args:
        owner: the callback that watches the metric
        argument: the argument of the callback that names the metric
        name: name of the metric in the run history
        greater_is_better: whether greater values are better; ``None``: see ``settle()``
        remedy: what to do if ``greater_is_better`` contradicts the metric itself

    Attributes:
        seen: number of values that have been returned or skipped
    """

    def __init__(
        self,
        owner: object,
        argument: str,
        name: str,
        greater_is_better: bool | None = None,
        remedy: str = "Omit greater_is_better.",
    ) -> None:
        self.name = name
        self.greater_is_better = greater_is_better
        self.seen = 0
        self._where = f"{type(owner).__name__}({argument}={name!r})"
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"{self._where} must be the name of a metric in the run history, such as 'eval_loss_epoch'."
            )
        self._requested = greater_is_better
        self._remedy = remedy
        self._has_value = False
        self._history: RunHistory | None = None

    def __str__(self) -> str:
        return self._where

    @property
    def direction(self) -> str:
        """The direction of the metric in words."""
        return direction_in_words(self.greater_is_better)

    def settle(self, known: bool | None, warns: bool) -> None:
        """Determine which values are better, from the user's argument or the metric itself; of losses, the smaller.

        Args:
            known: whether greater values are better according to the metric; ``None`` if that is unknown
            warns: whether this process warns if neither the user nor the metric says which values are better

        Raises:
            ValueError: if the argument and the metric contradict each other
        """
        if self._requested is None:
            if known is None and not is_loss(self.name) and warns:
                warn_outside(
                    f"{self}: whether greater values are better is unknown, so smaller ones are assumed to be better. "
                    "Pass greater_is_better=True or False."
                )
            self.greater_is_better = bool(known)
        elif known not in (None, self._requested):
            raise ValueError(
                f"{self}: greater_is_better={self._requested}, but according to the metric itself "
                f"{direction_in_words(known)}. {self._remedy}"
            )

    def start(self, trainer: TrainerLike) -> None:
        """Skip the values of earlier runs."""
        self._history = trainer.run_history
        self.seen = len(self._history.get_metric_values(self.name))
        self._has_value = False
        if self.greater_is_better is None:  # a subclass's configure_run may not declare the metric
            greater_is_better = trainer.current_run.request.metrics.directions.get(self.name)
            self.settle(greater_is_better, warns=trainer.ranks.rank == 0)

    def new_value(self, trainer: TrainerLike, mid_epoch: bool = False) -> float | None:
        """Return the newest value, or ``None`` if there is none since the last call.

        Args:
            mid_epoch: whether the epoch's evaluation is still to come

        Raises:
            TypeError: if it is not a single number
            ValueError: if the run has recorded no value although one was due; lists the recorded metrics
        """
        values = trainer.run_history.get_metric_values(self.name)
        count = len(values)
        index = _latest_of_run(trainer, self.name, range(min(self.seen, count), count))
        if index is None:
            if self._has_value or self._is_pending(trainer, mid_epoch):
                return None
            raise _missing_metric_error(self, self.name, trainer)
        self.seen = count
        self._has_value = True
        return _from_first_rank(self, self.name, _as_number(self, values[index]), trainer)

    def _is_pending(self, trainer: TrainerLike, mid_epoch: bool) -> bool:
        """Whether a value is still to come, from the evaluation that records the metric: within or after the epoch."""
        is_declared = self.name in trainer.current_run.request.metrics.evaluated
        is_intermediate = ("intermediate_" if is_declared else "intermediate_eval_") in self.name
        if mid_epoch:
            return not is_intermediate
        return is_intermediate or (bool(trainer.eval_dataloaders) and not trainer.current_run.evaluation_is_due)

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far; ``None`` before the first value. NaN is never better.

        A first value may be infinite, although it is no ``improvement()``: any model is better than none.
        """
        if math.isnan(value) or best is None:
            return not math.isnan(value)
        return value > best if self.greater_is_better else value < best

    def improvement(self, value: float, on: float | None) -> float:
        """Return by how much a value is better than another one, or than none yet; negative if it is worse."""
        return improvement(value, on, self.greater_is_better)

    def best_of(self, values: dict[Key, float], n: int) -> dict[Key, float]:
        """Return the n best values, best first."""
        return dict(best_first(values.items(), self.greater_is_better)[:n])

    def state_dict(self) -> StateDict:
        """Return the name of the metric, its direction, and the number of values seen."""
        return {"watch_metric": self.name, "greater_is_better": self.greater_is_better, "seen": self.seen}

    def load_state_dict(self, state: StateDict, owner: object) -> bool:
        """Load a state returned by ``state_dict()``, unless it belongs to another metric; return whether it was loaded.

        Warns if it was not loaded: the other values in the callback's state cannot be compared with new values.

        Args:
            owner: the callback whose state it is
        """
        name = state.get("watch_metric", self.name)  # older states lack the name
        direction = state.get("greater_is_better")  # unknown before a run
        directions = {direction, self.greater_is_better} - {None}
        if name != self.name or len(directions) > 1:
            warn_outside(
                f"{type(owner).__name__} starts over: it watches {self.name!r} ({self.direction}), but its training "
                f"state is for {name!r} ({direction_in_words(direction)}). Pass callbacks of the same class in the "
                "order in which they were saved."
            )
            return False
        if self.greater_is_better is None:
            self.greater_is_better = direction
        self.seen = state.get("seen", self.seen)
        self._has_value = self.seen > 0
        if self._history is not None:  # a history that is not saved lacks the values seen
            self.seen = min(self.seen, len(self._history.get_metric_values(self.name)))
        return True


def latest_metric(where: object, name: str, trainer: TrainerLike) -> float:
    """Return the newest value of a metric; that of an ``evaluate`` within the run only if the run records none.

    Args:
        where: the callback and its argument, or the argument of ``train``, that names the metric

    Raises:
        TypeError: if it is not a single number
        ValueError: if there is no value; lists the recorded metrics
    """
    values = trainer.run_history.get_metric_values(name)
    is_evaluated = name in trainer.current_run.request.metrics.evaluated
    index = _latest_of_run(trainer, name, range(len(values))[0 if is_evaluated else -1 :])
    if index is None:
        raise _missing_metric_error(where, name, trainer)
    return _from_first_rank(where, name, _as_number(where, values[index]), trainer)


def _from_first_rank(where: object, name: str, value: float, trainer: TrainerLike) -> float:
    """Return rank 0's value, so that all processes decide alike. Warns if other ranks have other values."""
    if trainer.ranks.world_size == 1:
        return value
    largest, negated = trainer.ranks.max([value, -value])
    if largest == -negated:
        return value
    by_rank: list[float] = trainer.ranks.everyone.all_gather_object(value)
    if len({*map(repr, by_rank)}) == 1:  # NaN everywhere
        return value
    differing = trainer.current_run.request.metrics.differing
    if name not in differing and trainer.ranks.rank == 0:
        values = ", ".join(f"{other:.6g} on rank {rank}" for rank, other in enumerate(by_rank))
        warn_outside(
            f"{where}: its values differ between the processes ({values}), so all decide by that of rank 0. Record the "
            "same value on each: for a mean, trainer.tensor_to_numeric(value, reduce='mean')."
        )
    differing.add(name)
    return by_rank[0]


def _as_number(where: object, value: MetricValue) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last for tensors of several elements
        raise TypeError(
            f"{where}: its value is {reprlib.repr(value)}, but only a single number can be compared. Let the metric "
            "average, or record each of its values under a name of its own, as torchmetrics' ClasswiseWrapper does."
        ) from None


def _latest_of_run(trainer: TrainerLike, name: str, indices: range) -> int | None:
    """Return the index of the latest value of a metric that counts, or ``None`` if no value does.

    A value that ``evaluate`` has recorded within the run counts only if there is no other value, and if the evaluations
    of the run are not known to record the metric.
    """
    run = trainer.current_run
    candidates = [index for index in indices if index not in run.latest.recorded_by_evaluate.get(name, ())]
    if not candidates and name not in run.request.metrics.evaluated:
        candidates = list(indices)
    return candidates[-1] if candidates else None


def _missing_metric_error(where: object, name: str, trainer: TrainerLike) -> ValueError:
    recorded = [metric for metric in trainer.run_history.get_metric_names() if metric != name]
    expected = trainer.current_run.request.metrics
    order = "must come before the one that watches it"
    if trainer.ranks.world_size > 1:
        order += ", and record it on every process, not only on the first"
    if name == f"{trainer.run_history.metric_name_prefix}eval_loss_epoch" and name in expected.evaluated:
        reason = ": the evaluation returned no loss."
    elif name in expected.directions:
        reason = f" yet. The callback that records it {order}."
    else:
        reason = f".{did_you_mean(name, recorded)}"
        if reason == "." and not all(is_from_this_package(type(callback)) for callback in trainer.callback_handler):
            reason = f" yet. A callback that records it {order}. In an epoch without a value, record float('nan')."
    return ValueError(
        f"{where}: the run has not recorded it{reason}"
        f"{'' if trainer.eval_dataloaders else ' train() was given no eval_dataset.'} "
        f"Recorded: {', '.join(recorded) or 'nothing yet'}."
    )
