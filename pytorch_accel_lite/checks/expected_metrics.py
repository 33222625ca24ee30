"""What a run will record, as far as that is known before it begins, and whether what is watched is among it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.utils import did_you_mean, is_ours
from pytorch_accel_lite.watching import WatchedMetric

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
    # By the parts of its name: those of a metric of evaluations are two, with the dataset's name between them.
    _known: dict[tuple[str, ...], bool | None] = field(default_factory=dict)
    _required: list[tuple[object, str]] = field(default_factory=list)  # by whom, under which name
    _said_all: list[object] = field(default_factory=list)  # owners that record nothing else
    _others: list[str] = field(default_factory=list)  # classes that may

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
        better = metrics if isinstance(metrics, Mapping) else dict.fromkeys(metrics)
        self._known |= {("", name) if in_evaluation else (name,): known for name, known in better.items()}
        if in_evaluation:
            self.evaluators.append(owner)
        if and_others:
            self._others.append(type(owner).__name__)
        else:
            self._said_all.append(owner)

    def include(self, nested: ExpectedMetrics, prefix: str, callbacks: Iterable[object]) -> None:
        """Add what callbacks record in evaluations of their own, under a prefix."""
        self._known |= {(prefix, parts[1]): better for parts, better in nested._known.items() if len(parts) == 2}
        self._others += nested._may_record_others(callbacks)

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
        others = self._may_record_others([trainer, trainer.run_history, *trainer.callback_handler])
        known: dict[tuple[str, ...], bool | None] = {("train_loss_epoch",): False, **self._known}
        if others or self.within_epochs:
            known |= {("", f"intermediate_{parts[1]}"): known[parts] for parts in self._known if parts[0] == ""}
            known["", "intermediate_eval_loss"] = False
        known["", "eval_loss_epoch"] = False
        datasets = _dataset_prefixes(trainer.eval_dataset)
        prefix = trainer.run_history.metric_name_prefix
        possible = {f"{prefix}{of.join(parts)}": known[parts] for parts in known for of in datasets or [""]}
        in_epochs = {f"{prefix}{parts[0]}" for parts in known if len(parts) == 1}
        self.directions = {name: possible[name] for name in possible if datasets or name in in_epochs}
        self.evaluated = {name: better for name, better in self.directions.items() if name not in in_epochs}
        for where, name in self._required:
            if name not in self.directions and not (_is_part_of_a_loss(name, datasets) and _has_parts(trainer)):
                _refuse(where, name, _NEEDS_EVALUATION if name in possible else "", self.directions, others)
            if isinstance(where, WatchedMetric):
                where.settle(possible.get(name))

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

    def _may_record_others(self, parts: Iterable[object]) -> list[str]:
        """Return the classes of those that may record what they do not say: all that are not of this package."""
        say_all = [part for part in self._said_all if "configure_run" in vars(type(part))]
        silent = [type(part).__name__ for part in parts if not is_ours(type(part)) and part not in say_all]
        return [*silent, *self._others]


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
