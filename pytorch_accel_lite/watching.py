"""What a run records, as far as that is known before it begins; and following one of its metrics."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.utils import did_you_mean

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

Directions = dict[str, bool | None]  # whether greater values are better, by name; None: not known

_NEEDS_EVALUATION = " train() was given no eval_dataset. Pass one, or watch a metric of the training."


@dataclass
class ExpectedMetrics:
    """What a run records and what is watched in it. Callbacks say so in ``configure_run``, by ``request.metrics``.

    A watched metric that cannot come is then an error before the first batch, and which of its values are better need
    not be said. Your own callbacks and trainers may record metrics without saying so.

    :ivar directions: whether greater values are better, of each metric that the run is known to record
    :ivar evaluated: the same, of those that are recorded in evaluations
    :ivar evaluators: the callbacks that record metrics in evaluations
    :ivar within_epochs: a callback evaluates within epochs, too
    """

    directions: Directions = field(default_factory=dict)
    evaluated: Directions = field(default_factory=dict)
    evaluators: list[object] = field(default_factory=list)
    within_epochs: bool = False
    _in_epochs: Directions = field(default_factory=dict)
    _in_evaluations: dict[tuple[str, str], bool | None] = field(default_factory=dict)  # by prefix and name
    _required: list[tuple[object, str]] = field(default_factory=list)  # by whom, under which name
    _recorders: list[object] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)  # classes that may record what they do not say

    def record(
        self,
        owner: object,
        metrics: Mapping[str, bool | None] | Iterable[str],
        *,
        in_evaluation: bool = False,
        and_others: bool = False,
    ) -> None:
        """Say that a callback records metrics.

        :param owner: the callback
        :param metrics: their names; or, by name, whether greater values are better, ``None`` where that is not known
        :param in_evaluation: they are recorded in every evaluation, of several datasets once for each; in evaluations
            within an epoch with the prefix ``intermediate_``
        :param and_others: it may record others too
        """
        known = dict(metrics) if isinstance(metrics, Mapping) else dict.fromkeys(metrics)
        self._recorders.append(owner)
        if in_evaluation:
            self._in_evaluations |= {("", name): better for name, better in known.items()}
            self.evaluators.append(owner)
        else:
            self._in_epochs |= known
        if and_others:
            self._open.append(type(owner).__name__)

    def include(self, nested: ExpectedMetrics, prefix: str, callbacks: Iterable[object]) -> None:
        """Add what callbacks record in evaluations of their own, under a prefix."""
        self._in_evaluations |= {(prefix, name): better for (_, name), better in nested._in_evaluations.items()}
        self._open += [*nested._open, *nested._silent(callbacks)]

    def watch(self, watched: WatchedMetric) -> None:
        """Say that a callback watches a metric: it must be recorded, and its direction is settled."""
        self.require(watched, watched.name)

    def require(self, where: object, name: str) -> None:
        """Say that a metric must be recorded.

        :param where: the callback and its argument, or the argument of ``train``, that names the metric
        """
        self._required.append((where, name))

    @property
    def watched(self) -> list[WatchedMetric]:
        """The metrics that callbacks watch, in the order of the callbacks."""
        return [where for where, _ in self._required if isinstance(where, WatchedMetric)]

    def settle(self, trainer: Trainer) -> None:
        """Work out what the run will record, and settle the direction of each watched metric.

        :raises ValueError: for a watched metric that certainly is not recorded, or whose direction is another
        """
        prefix = trainer.run_history.metric_name_prefix
        of_datasets = _dataset_prefixes(trainer.eval_dataset)
        others = [*self._silent([trainer, trainer.run_history, *trainer.callback_handler]), *self._open]
        evaluated = self._in_evaluations
        if others or self.within_epochs:
            own = {name: better for (of, name), better in evaluated.items() if not of}
            evaluated |= {("", f"intermediate_{name}"): better for name, better in own.items()}
            evaluated["", "intermediate_eval_loss"] = False
        evaluated["", "eval_loss_epoch"] = False
        in_epochs = {"train_loss_epoch": False} | self._in_epochs
        self.directions = {f"{prefix}{name}": better for name, better in in_epochs.items()}
        self.evaluated = self._of_evaluations(prefix, of_datasets)
        self.directions |= self.evaluated
        without_data = {} if of_datasets else self._of_evaluations(prefix, [""])
        for where, name in self._required:
            if name not in self.directions and not (_is_part_of_a_loss(name, of_datasets) and _has_parts(trainer)):
                _refuse(where, name, _NEEDS_EVALUATION if name in without_data else "", self.directions, others)
            if isinstance(where, WatchedMetric):
                where.settle((without_data | self.directions).get(name))

    def check_evaluated(self, recorded: Iterable[str], prefix: str) -> None:
        """Check that an evaluation has recorded what was to be recorded in it.

        :raises ValueError: for the first watched metric that is missing, and that comes from nowhere else
        """
        recorded = list(recorded)
        for where, name in self._required:
            is_elsewhere = name in self.directions or "intermediate_" in name or name.startswith(f"{prefix}train_")
            if name not in recorded and not is_elsewhere:
                raise ValueError(
                    f"{where}: the evaluation before training did not record it.{did_you_mean(name, recorded)} "
                    f"It recorded: {', '.join(recorded)}. If one of your callbacks records it elsewhere, let its "
                    f"configure_run say so: request.metrics.record(self, [{name!r}])."
                )

    def _silent(self, parts: Iterable[object]) -> list[str]:
        """Return the classes of those that are not of this package, and do not say themselves what they record."""
        return [
            type(part).__name__
            for part in parts
            if is_foreign(part) and not (part in self._recorders and "configure_run" in vars(type(part)))
        ]

    def _of_evaluations(self, prefix: str, of_datasets: Iterable[str]) -> Directions:
        known = self._in_evaluations.items()
        return {f"{prefix}{own}{of}{name}": better for of in of_datasets for (own, name), better in known}


class WatchedMetric:
    """Gives each value of a metric once. Epochs without an evaluation have none.

    :param owner: the callback that watches it, and ``argument`` its argument with the name
    :param name: its name in the run history
    :param greater_is_better: whether larger values are better; ``None``: see :meth:`settle`
    :ivar seen: how many values have been given or passed over
    """

    def __init__(self, owner: object, argument: str, name: str, greater_is_better: bool | None = None) -> None:
        self.name = name
        self.greater_is_better = greater_is_better
        self.seen = 0
        self._where = f"{type(owner).__name__}({argument}={name!r})"
        self._given = greater_is_better
        self._came = False

    def __str__(self) -> str:
        return self._where

    @property
    def direction(self) -> str:
        """The direction in words."""
        return _in_words(self.greater_is_better)

    def settle(self, known: bool | None) -> None:
        """Settle which values are better: those that the user says, or else the metric; of losses the smaller ones.

        :param known: what the metric itself says, if anything
        :raises ValueError: when both are known and contradict each other
        """
        if self._given is None:
            if known is None and "loss" not in self.name:
                warnings.warn(
                    f"{self}: whether greater values are better is not known, so smaller ones are taken to be. "
                    "Say it: greater_is_better=True, or False.",
                    stacklevel=7,  # where train() is called
                )
            self.greater_is_better = bool(known)
        elif known not in (None, self._given):
            raise ValueError(
                f"{self}: greater_is_better={self._given}, but the metric itself says that {_in_words(known)}. "
                "Leave greater_is_better out."
            )

    def start(self, trainer: Trainer) -> None:
        """Pass over the values of earlier runs."""
        self.seen = len(trainer.run_history.get_metric_values(self.name))
        self._came = False
        if self.greater_is_better is None:  # by a subclass whose configure_run does not say that it is watched
            self.settle(trainer.current_run.request.metrics.directions.get(self.name))

    def new_value(self, trainer: Trainer, mid_epoch: bool = False) -> float | None:
        """Return the newest value, ``None`` when there has been no other since the last.

        :param mid_epoch: the epoch's evaluation is still to come
        :raises ValueError: when the run has brought none although one was due; the message lists what there is
        """
        history = trainer.run_history
        count = len(history.get_metric_values(self.name))
        if count == self.seen:
            if self._came or self._is_to_come(trainer, mid_epoch):
                return None
            raise _missing(self, self.name, trainer)
        self.seen = count
        self._came = True
        return float(history.get_latest_metric(self.name))

    def _is_to_come(self, trainer: Trainer, mid_epoch: bool) -> bool:
        is_intermediate = "intermediate_" in self.name
        if mid_epoch:
            return not is_intermediate
        return is_intermediate or (bool(trainer.eval_dataloaders) and not trainer.current_run.evaluation_is_due)

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far, ``None`` when there is none; NaN never is."""
        if math.isnan(value) or best is None:
            return not math.isnan(value)
        return value > best if self.greater_is_better else value < best

    def state_dict(self) -> dict[str, Any]:
        """Return what was watched, and how many values have been seen."""
        return {"watch_metric": self.name, "greater_is_better": self.greater_is_better, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any], owner: object) -> bool:
        """Take over what :meth:`state_dict` returned and return ``True``; of another metric, warn and return ``False``.

        Then the values in the rest of the state mean something else, and must not be compared with what is to come.

        :param owner: whose state it is
        """
        mine = self.state_dict()
        theirs = mine | {key: value for key, value in state.items() if key in mine}  # older states do not name it
        directions = {mine["greater_is_better"], theirs["greater_is_better"]} - {None}  # not settled before a run
        if self.name != theirs["watch_metric"] or len(directions) > 1:
            warnings.warn(
                f"{type(owner).__name__} begins again: it watches {_described(mine)}, and its training state is of "
                f"{_described(theirs)}. Give callbacks of one kind in the order in which they were saved.",
                stacklevel=3,
            )
            return False
        if self.greater_is_better is None:
            self.greater_is_better = theirs["greater_is_better"]
        self.seen = theirs["seen"]
        self._came = self.seen > 0
        return True


def latest_metric(where: object, name: str, trainer: Trainer) -> Any:
    """Return the newest value of a metric.

    :param where: the callback and its argument, or the argument of ``train``, that names the metric
    :raises ValueError: when there is none; the message lists what there is
    """
    if not trainer.run_history.get_metric_values(name):
        raise _missing(where, name, trainer)
    return trainer.run_history.get_latest_metric(name)


def _missing(where: object, name: str, trainer: Trainer) -> ValueError:
    recorded = [known for known in trainer.run_history.get_metric_names() if known != name]
    return ValueError(
        f"{where}: the run has not recorded it.{did_you_mean(name, recorded)}"
        f"{'' if trainer.eval_dataloaders else ' train() was given no eval_dataset.'} "
        f"Recorded: {', '.join(recorded) or 'nothing yet'}."
    )


def _refuse(where: object, name: str, reason: str, directions: Directions, others: list[str]) -> None:
    """Refuse a metric that nothing records; warn where something that does not say what it records may do so."""
    hint = reason or did_you_mean(name, directions, cutoff=0.85 if others else 0.6)
    if not others:
        known = "" if reason else f" It records: {', '.join(directions)}."
        raise ValueError(f"{where}: the run will not record it.{hint}{known}")
    if hint:
        warnings.warn(
            f"{where}: the run will not record it, unless {' or '.join(dict.fromkeys(others))} does.{hint}",
            stacklevel=7,  # where train() is called
        )


def is_foreign(part: object) -> bool:
    """Whether a trainer, its history or a callback is not of this package, and may record anything."""
    return type(part).__module__.partition(".")[0] != __package__


def _dataset_prefixes(dataset: Any) -> list[str]:
    """Return what is put before the names of an evaluation's metrics, for each dataset that is evaluated."""
    if isinstance(dataset, dict):
        return [f"{name}_" for name in dataset]
    return [] if dataset is None else [""]


def _has_parts(trainer: Trainer) -> bool:
    """Whether the loss may consist of several by name. Those of torch do not."""
    return not str(getattr(trainer.loss_func, "__module__", "")).startswith("torch.nn")


def _is_part_of_a_loss(name: str, of_datasets: list[str]) -> bool:
    kinds = "train_.+_epoch|eval_.+_epoch|intermediate_eval_.+" if of_datasets else "train_.+_epoch"
    return re.search(rf"({kinds})$", name) is not None


def _in_words(greater_is_better: bool | None) -> str:
    return "greater is better" if greater_is_better else "smaller is better"


def _described(state: dict[str, Any]) -> str:
    return f"{state['watch_metric']!r} ({_in_words(state['greater_is_better'])})"
