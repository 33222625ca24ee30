"""The metrics that a run is expected to record, and whether they include those that are watched."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pytorch_accel_lite.base.inspection import is_ours, is_overridden
from pytorch_accel_lite.base.text import did_you_mean


class Watched(Protocol):
    """A metric that a callback watches."""

    name: str

    def settle(self, known: bool | None, warns: bool) -> None:
        """Settle which values are better, as far as known from the run."""


Directions = dict[str, bool | None]  # whether greater values are better, by name; None if unknown

_NEEDS_EVALUATION = " train() was given no eval_dataset. Pass one, or watch a training metric."


@dataclass
class ExpectedMetrics:
    """The metrics that a run records and watches, declared by callbacks in ``configure_run`` via ``request.metrics``.

    This way, watching a metric that cannot be recorded is an error before the first batch, and whether greater values
    are better need not be specified. Your own callbacks and trainers may record metrics without declaring them.

    :ivar directions: whether greater values are better, for each metric that the run is known to record
    :ivar evaluated: the same for the metrics recorded in evaluations
    :ivar evaluators: the callbacks that record metrics in evaluations
    :ivar watched: the metrics that callbacks watch, in the order of the callbacks
    :ivar losses: the losses of the evaluations, if they have any
    :ivar may_lack_loss: whether the loss of evaluations is needed, but may not exist, which only trying one can tell
    :ivar within_epochs: whether a callback evaluates within epochs
    """

    directions: Directions = field(default_factory=dict)
    evaluated: Directions = field(default_factory=dict)
    evaluators: list[object] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)
    within_epochs: bool = False
    losses: set[str] = field(default_factory=set)
    may_lack_loss: bool = False
    # By the parts of a name: metrics of evaluations have two, with the name of the dataset in between.
    _known: dict[tuple[str, ...], bool | None] = field(default_factory=dict)
    _recorders: dict[tuple[str, ...], object] = field(default_factory=dict)
    _required: list[tuple[object, str]] = field(default_factory=list)  # owner and name
    _said_all: list[object] = field(default_factory=list)  # owners that record no undeclared metrics
    _others: list[str] = field(default_factory=list)  # classes that may record some

    def record(
        self,
        owner: object,
        metrics: Mapping[str, bool | None] | Iterable[str],
        *,
        in_evaluation: bool = False,
        and_others: bool = False,
    ) -> None:
        """Declare that a callback records metrics.

        :param owner: the callback
        :param metrics: names of the metrics, or a dict from their names to whether greater values are better (``None``
            if unknown)
        :param in_evaluation: whether they are recorded in every evaluation: once for each dataset, and within epochs
            with the prefix ``intermediate_``
        :param and_others: whether the callback may record further metrics
        :raises ValueError: if another callback records one of them, as each epoch would have two values of it
        """
        better = metrics if isinstance(metrics, Mapping) else dict.fromkeys(metrics)
        for name, known in better.items():
            parts = ("", name) if in_evaluation else (name,)
            self._known[parts] = known
            other = self._recorders.setdefault(parts, owner)
            if other is not owner:
                raise ValueError(
                    f"Both {type(other).__name__} and {type(owner).__name__} record the metric {name!r}, so each "
                    "epoch would have two values of it. Record one of them under another name, or leave one "
                    "callback out."
                )
        if in_evaluation:
            self.evaluators.append(owner)
        if and_others:
            self._others.append(type(owner).__name__)
        else:
            self._said_all.append(owner)

    def include(self, nested: ExpectedMetrics, prefix: str, callbacks: Iterable[object]) -> None:
        """Add the metrics that callbacks record in separate evaluations, under a prefix."""
        self._known |= {(prefix, parts[1]): better for parts, better in nested._known.items() if len(parts) == 2}
        self._others += nested._may_record_others(callbacks)

    def watch(self, watched: Watched) -> None:
        """Declare that a callback watches a metric: it must be recorded, and its direction will be determined."""
        self.watched.append(watched)
        self.require(watched, watched.name)

    def require(self, where: object, name: str) -> None:
        """Declare that a metric must be recorded.

        :param where: the callback and its argument, or the argument of ``train``, that names the metric
        """
        self._required.append((where, name))

    def settle(self, trainer: Any) -> None:
        """Determine the metrics that the run will record, and the direction of each watched metric.

        :raises ValueError: if a watched metric will certainly not be recorded, or has the opposite direction, or if a
            metric is named ``epoch``
        """
        others = self._may_record_others([trainer, trainer.run_history, *trainer.callback_handler])
        known: dict[tuple[str, ...], bool | None] = {("train_loss_epoch",): False, **self._known}
        every = trainer.current_run.request.eval_every_n_epochs
        if every is None and trainer.eval_dataset is not None and not (others or self.within_epochs):
            raise ValueError(
                "eval_every_n_epochs=None leaves evaluations to callbacks, but none makes any. Add a "
                "StepBasedEvaluationCallback, or pass a number of epochs."
            )
        if others or (self.within_epochs and every is not None):
            known |= {("", f"intermediate_{parts[1]}"): known[parts] for parts in self._known if parts[0] == ""}
            known["", "intermediate_eval_loss"] = False
        known["", "eval_loss_epoch"] = False
        datasets = _dataset_prefixes(trainer.eval_dataset)
        prefix = trainer.run_history.metric_name_prefix
        possible = {f"{prefix}{of.join(parts)}": known[parts] for parts in known for of in datasets or [""]}
        self.losses = {f"{prefix}{of}eval_loss_epoch" for of in datasets}
        has_own_loss = trainer.loss_func is None and is_overridden(trainer, "calculate_eval_batch_loss")
        self.may_lack_loss = has_own_loss and any(name in self.losses for _, name in self._required)
        trains_own_loss = any(is_overridden(trainer, name) for name in ("calculate_train_batch_loss", "train_step"))
        if trainer.loss_func is None and trains_own_loss and not has_own_loss:
            self.may_lack_loss = bool(datasets)  # unless the model returns one
        in_epochs = {f"{prefix}{parts[0]}" for parts in known if len(parts) == 1}
        self.directions = {name: possible[name] for name in possible if datasets or name in in_epochs}
        self.evaluated = {name: better for name, better in self.directions.items() if name not in in_epochs}
        if "epoch" in self.directions:
            raise ValueError(
                "A callback records a metric called 'epoch', like the column of epochs in tables and files. Give the "
                "metric another name."
            )
        for where, name in self._required:
            if name not in self.directions and not (_is_part_of_a_loss(name, datasets) and _has_parts(trainer)):
                reason = _NEEDS_EVALUATION if name in possible else ""
                refuse(where, name, reason, self.directions, others, warns=trainer.ranks.rank == 0)
            for watched in self.watched:
                if watched is where:
                    watched.settle(possible.get(name), warns=trainer.ranks.rank == 0)

    def check_evaluated(self, recorded: Iterable[str], prefix: str, losses_only: bool) -> None:
        """Check that an evaluation has recorded the watched metrics expected from it.

        :param losses_only: whether it was made without callbacks
        :raises ValueError: if a watched metric is missing and not recorded elsewhere
        """
        recorded = list(recorded)
        for where, name in self._required:
            if name in self.losses and name not in recorded:
                raise ValueError(
                    f"{where}: the evaluation before training returned no loss. Watch what it records "
                    f"({', '.join(recorded) or 'nothing yet'}), or return a loss in calculate_eval_batch_loss()."
                )
            is_elsewhere = name in self.directions or "intermediate_" in name or name.startswith(f"{prefix}train_")
            if name not in recorded and not is_elsewhere and not losses_only:
                raise ValueError(
                    f"{where}: the evaluation before training did not record it.{did_you_mean(name, recorded)} "
                    f"It recorded: {', '.join(recorded)}. If one of your callbacks records it elsewhere, declare it "
                    f"in its configure_run: request.metrics.record(self, [{name!r}])."
                )

    def _may_record_others(self, parts: Iterable[object]) -> list[str]:
        """Return the classes of those that may record undeclared metrics: in general, all outside this package."""
        say_all = [part for part in self._said_all if "configure_run" in vars(type(part))]
        silent = [type(part).__name__ for part in parts if not is_ours(type(part)) and part not in say_all]
        return [*silent, *self._others]


def _dataset_prefixes(dataset: Any) -> list[str]:
    """Return the prefix of the metric names for each evaluation dataset."""
    if isinstance(dataset, dict):
        return [f"{name}_" for name in dataset]
    return [] if dataset is None else [""]


def _has_parts(trainer: Any) -> bool:
    """Whether the loss may consist of several named losses, which torch's loss functions never do."""
    return not str(getattr(trainer.loss_func, "__module__", "")).startswith("torch.nn")


def _is_part_of_a_loss(name: str, of_datasets: list[str]) -> bool:
    kinds = "train_.+_epoch|eval_.+_epoch|intermediate_eval_.+" if of_datasets else "train_.+_epoch"
    return re.search(rf"({kinds})$", name) is not None


def refuse(where: object, name: str, reason: str, directions: Directions, others: list[str], warns: bool) -> None:
    """Raise an error for a metric that is never recorded, or warn if a user-defined class might record it.

    :param warns: whether this process is the one that warns
    """
    hint = reason or did_you_mean(name, directions, cutoff=0.85 if others else 0.6)
    if not others:
        known = "" if reason else f" It records: {', '.join(directions)}."
        raise ValueError(f"{where}: the run will not record it.{hint}{known}")
    if hint and warns:
        warnings.warn(
            f"{where}: the run will not record it, unless {' or '.join(dict.fromkeys(others))} does.{hint}",
            stacklevel=7,  # the call of train()
        )
