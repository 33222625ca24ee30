"""The metrics that a run is expected to record, and the check that they include the watched ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pytorch_accel_lite.base.display import short_repr
from pytorch_accel_lite.base.unknown_names import did_you_mean
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.batch_adapter import LossFunction, is_of_torch
from pytorch_accel_lite.data.sources import is_named
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.run.history import RunHistory


class RecordingTrainer(Protocol):
    """The part of a trainer that determines what a run records."""

    loss_func: LossFunction | None
    run_history: RunHistory

    @property
    def eval_dataset(self) -> object: ...  # noqa: D102
    @property
    def callback_handler(self) -> Iterable[object]: ...  # noqa: D102
    @property
    def ranks(self) -> Ranks: ...  # noqa: D102


class WatchesMetric(Protocol):
    """A metric that a callback watches."""

    name: str
    greater_is_better: bool | None

    def settle(self, known: bool | None, warns: bool) -> None:
        """Settle which values are better, as far as known from the run."""


Directions = dict[str, bool | None]  # whether greater values are better, by name; None if unknown


class _Declared(NamedTuple):
    """A metric that a callback records."""

    owner: object
    greater_is_better: bool | None


#: The names of the losses that evaluations record.
_OF_EVALUATIONS = ("eval_loss_epoch", "intermediate_eval_loss", "evaluation_loss")
_RUN = "the run itself, as a loss,"
_NEEDS_EVALUATION = " train() was given no eval_dataset. Pass one, or watch a training metric."


@dataclass(eq=False, repr=False)
class ExpectedMetrics:
    """The metrics that a run records and watches, declared by callbacks in ``configure_run`` via ``request.metrics``.

    So a watched metric that cannot be recorded is an error before the first batch, and users need not specify whether
    greater values are better. Your own callbacks and trainers may record metrics without declaring them.

    Attributes:
        directions: whether greater values are better, for each metric that the run is known to record
        evaluated: the same for metrics that are recorded in evaluations
        watched: the metrics that callbacks watch, in the order of the callbacks
        within_epochs: whether a callback evaluates within epochs
        differing: the metrics that were found to differ between the processes
    """

    directions: Directions = field(default_factory=dict)
    evaluated: Directions = field(default_factory=dict)
    watched: list[WatchesMetric] = field(default_factory=list)
    within_epochs: bool = False
    differing: set[str] = field(default_factory=set)
    # By name and the prefix of the evaluations, which is empty for those of the run.
    _in_epochs: dict[tuple[str, str], _Declared] = field(default_factory=dict)
    _in_evaluations: dict[tuple[str, str], _Declared] = field(default_factory=dict)
    _required: list[tuple[object, str]] = field(default_factory=list)  # pairs of an owner and a name
    _complete: list[object] = field(default_factory=list)  # owners that record no undeclared metrics
    _others: list[str] = field(default_factory=list)  # classes that may record undeclared metrics

    def record(
        self,
        owner: object,
        metrics: Mapping[str, bool | None] | Iterable[str],
        *,
        in_evaluation: bool = False,
        and_others: bool = False,
    ) -> None:
        """Declare that a callback records metrics.

        Args:
            owner: the callback
            metrics: names of the metrics, or a dict from their names to whether greater values are better (``None`` if
                unknown)
            in_evaluation: whether the metrics are recorded in every evaluation: once for each dataset, and within
                epochs with the prefix ``intermediate_``
            and_others: whether the callback may record further metrics

        Raises:
            ValueError: if another callback records one of the metrics, so that each epoch would have two values of it
        """
        declared = self._in_evaluations if in_evaluation else self._in_epochs
        for name, better in (metrics if isinstance(metrics, Mapping) else dict.fromkeys(metrics)).items():
            other = declared.get(("", name))
            if other is not None and other.owner is not owner:
                raise ValueError(
                    f"Both {type(other.owner).__name__} and {type(owner).__name__} record the metric {name!r}, so each "
                    "epoch would have two values of it. Record one of them under another name, or leave one "
                    "callback out."
                )
            declared["", name] = _Declared(owner, better)
        if and_others:
            self._others.append(type(owner).__name__)
        else:
            self._complete.append(owner)

    def include(self, nested: ExpectedMetrics, prefix: str, callbacks: Iterable[object]) -> None:
        """Add the metrics that callbacks record in separate evaluations, under a prefix."""
        self._in_evaluations |= {(prefix, name): metric for (_, name), metric in nested._in_evaluations.items()}
        self._others += nested._may_record_others(callbacks)

    def watch(self, watched: WatchesMetric) -> None:
        """Declare that a callback watches a metric, which must then be recorded, and whose direction is determined."""
        self.watched.append(watched)
        self.require(watched, watched.name)

    def require(self, where: object, name: str) -> None:
        """Declare that a metric must be recorded.

        Args:
            where: the callback and its argument, or the argument of ``train``, that names the metric
        """
        self._required.append((where, name))

    def settle(self, trainer: RecordingTrainer) -> None:
        """Determine the metrics that the run will record, and the direction of each watched metric.

        Raises:
            ValueError: if a watched metric will certainly not be recorded, or has the opposite direction; or if two
                metrics would have one name
        """
        others = self._may_record_others([trainer, trainer.run_history, *trainer.callback_handler])
        intermediate = bool(others) or self.within_epochs
        data = trainer.eval_dataset
        datasets = [f"{name}_" for name in data] if is_named(data) else [] if data is None else [""]
        prefix = trainer.run_history.metric_name_prefix
        self._check_owners(datasets)
        in_epochs: Directions = {f"{prefix}train_loss_epoch": False}
        in_epochs |= {f"{prefix}{name}": metric.greater_is_better for (_, name), metric in self._in_epochs.items()}
        self.evaluated = self._in_evaluations_of(datasets, prefix, intermediate)
        self.directions = in_epochs | self.evaluated
        possible = in_epochs | self._in_evaluations_of(datasets or [""], prefix, intermediate)
        warns = trainer.ranks.rank == 0
        for where, name in self._required:
            if name not in self.directions:
                by_loss, if_evaluated = (
                    _losses_that_may_record(name, trainer.loss_func, evaluated, prefix)
                    for evaluated in (datasets, datasets or [""])
                )
                hint = _NEEDS_EVALUATION if name in possible or len(if_evaluated) > len(by_loss) else ""
                _refuse_unrecorded(where, name, hint, self.directions, others + by_loss, warns)
        for watched in self.watched:
            watched.settle(possible.get(watched.name), warns)

    def _check_owners(self, datasets: list[str]) -> None:
        """Check that no two recorders (callbacks, losses of the run, datasets) use the same name."""
        owners: dict[str, str] = {}
        for name, owner in self._recorded(datasets):
            if name in owners:
                raise ValueError(
                    f"Both {owners[name]} and {owner} record the metric {name!r}, so each epoch would have two values "
                    "of it. Give the metric of the callback another name."
                )
            owners[name] = owner

    def _recorded(self, datasets: list[str]) -> Iterator[tuple[str, str]]:
        """Yield the name of each metric of the run, without the prefix of the history, and the name of its recorder."""
        yield "train_loss_epoch", _RUN
        for data in datasets:
            of_dataset = f" (of eval_dataset[{data[:-1]!r}])" if data else ""
            for name in _OF_EVALUATIONS:
                yield f"{data}{name}", _RUN
            for (source, name), metric in self._in_evaluations.items():
                owner = f"{type(metric.owner).__name__}{of_dataset}"
                yield f"{source}{data}{name}", owner
                if self.within_epochs and not source:
                    yield f"{data}intermediate_{name}", owner
        for (_, name), metric in self._in_epochs.items():
            yield name, type(metric.owner).__name__

    def _in_evaluations_of(self, datasets: list[str], prefix: str, intermediate: bool) -> Directions:
        """Return the metrics that evaluations of datasets record.

        Args:
            intermediate: whether there may be evaluations within epochs
        """
        metrics = {key: metric.greater_is_better for key, metric in self._in_evaluations.items()}
        of_run = {name: better for (source, name), better in metrics.items() if not source}
        metrics["", "eval_loss_epoch"] = False
        if intermediate:
            metrics |= {("", f"intermediate_{name}"): better for name, better in of_run.items()}
            metrics["", "intermediate_eval_loss"] = False
        return {
            f"{prefix}{source}{data}{name}": better for (source, name), better in metrics.items() for data in datasets
        }

    def _may_record_others(self, parts: Iterable[object]) -> list[str]:
        """Return the classes that may record undeclared metrics: in general, all classes outside this package."""
        complete = [part for part in self._complete if "configure_run" in vars(type(part))]
        silent = [
            type(part).__name__ for part in parts if not is_from_this_package(type(part)) and part not in complete
        ]
        return [*silent, *self._others]


def _losses_that_may_record(name: str, loss_func: LossFunction | None, datasets: list[str], prefix: str) -> list[str]:
    """Return the functions that may return a dict of losses, if such a loss may be recorded as ``name``."""
    if is_of_torch(loss_func):
        return []
    evaluated = [f"{re.escape(data)}(eval_.+_epoch|intermediate_eval_.+)" for data in datasets]
    is_like_one = re.fullmatch("|".join(f"{re.escape(prefix)}{one}" for one in ["train_.+_epoch", *evaluated]), name)
    return ["the model" if loss_func is None else short_repr(loss_func)] if is_like_one else []


def _refuse_unrecorded(
    where: object, name: str, reason: str, directions: Directions, others: list[str], warns: bool
) -> None:
    """Raise an error for a metric that is never recorded; warn instead if a user-defined class might record it.

    Args:
        warns: whether this process is the one that warns
    """
    hint = reason or did_you_mean(name, directions, cutoff=0.85 if others else 0.6)
    if not others:
        recorded = "" if reason else f" It records: {', '.join(directions)}."
        raise ValueError(f"{where}: the run will not record it.{hint}{recorded}")
    if hint and warns:
        warn_outside(f"{where}: the run will not record it, unless {' or '.join(dict.fromkeys(others))} does.{hint}")
