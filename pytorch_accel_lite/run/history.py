"""The history of a run: the recorded metrics with their epochs."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pytorch_accel_lite.base.arguments import check_names
from pytorch_accel_lite.base.display import format_metric, join_wrapped
from pytorch_accel_lite.base.optional_packages import import_extra
from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.unknown_names import did_you_mean
from pytorch_accel_lite.base.warnings_and_errors import warn_outside

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


#: The value of a metric: usually a number, but a program may record anything.
MetricValue: TypeAlias = Any
#: The values of metrics by name, with the number of the epoch as ``epoch``.
Row: TypeAlias = dict[str, MetricValue]

#: What shows a history in a notebook: returns HTML, or ``None`` if the history does not know the epochs of its values.
HISTORY_TABLE: Slot[Callable[[RunHistory], str | None]] = Slot("progress_table")


class CurvePlots(Protocol):
    """Draws the curves of a history. Extensions draw more with it: ``extending.Plots``."""

    def plot_curves(
        self,
        curves: Mapping[str, tuple[Sequence[int], Sequence[MetricValue]]],
        path: str | os.PathLike[str] | None = None,
        directions: Mapping[str, bool | None] | None = None,
    ) -> Figure:
        """Plot metrics over epochs."""


#: What draws plots.
PLOTS: Slot[CurvePlots] = Slot("plots")


class RunHistory(ABC):
    """The metrics of a run, in the order in which they were recorded, and the number of the current epoch.

    ``history["accuracy"]`` returns all values of a metric, oldest first, as a copy. Iteration, ``in`` and ``len`` refer
    to the names, as with a dict, and ``dict(history)`` is one. Unlike an empty dict, an empty history is true. Its
    ``repr`` shows the latest values.

    To write a history of your own, derive it from ``InMemoryRunHistory``, or define the abstract methods. A run records
    the mean losses of each epoch with ``record_means``, then calls ``_increment_epoch`` and ``set_between_epochs``. It
    calls ``shorten`` and ``recording_apart`` for evaluations that do not belong to it. Except the first two, a history
    may leave them as they are.
    """

    #: Whether greater values are better, by metric name, as far as known from the run.
    directions: Mapping[str, bool | None] = MappingProxyType({})

    @abstractmethod
    def get_metric_names(self) -> Iterable[str]:
        """Return the names of all metrics that have been recorded, each once."""

    @abstractmethod
    def get_metric_values(self, metric_name: str) -> Sequence[MetricValue]:
        """Return all values of a metric, oldest first, as a copy; an empty sequence if it was never recorded."""

    @abstractmethod
    def get_latest_metric(self, metric_name: str) -> MetricValue:
        """Return the newest value of a metric.

        Raises:
            ValueError: if it was never recorded; lists the recorded metrics
        """

    @abstractmethod
    def update_metric(self, metric_name: str, metric_value: MetricValue) -> None:
        """Record a value of the metric named by the current prefix and ``metric_name``; ``None`` is not a value."""

    @abstractmethod
    def delete_metric(self, metric_name: str) -> None:
        """Delete a metric with all its values."""

    @abstractmethod
    def set_metric_name_prefix(self, prefix: str = "") -> None:
        """Set the prefix for the names of metrics recorded from now on."""

    @property
    @abstractmethod
    def metric_name_prefix(self) -> str:
        """The current prefix for the names of metrics."""

    @property
    @abstractmethod
    def current_epoch(self) -> int:
        """The epoch being trained, counted from 1."""

    # What a run calls, besides update_metric. The names of the first two are those of pytorch-accelerated.

    @abstractmethod
    def _increment_epoch(self) -> None:
        """Begin the next epoch. Called after each epoch, and by programs with a loop of their own."""

    def _set_epoch(self, epoch: int) -> None:  # noqa: B027
        """Set the epoch for an evaluation after a run. Histories may ignore it."""

    def set_between_epochs(self, is_between: bool) -> None:  # noqa: B027
        """Set whether the current epoch has not begun, so that values belong to the previous one.

        A run counts an epoch before ``on_epoch_checkpoint``: states that are saved there begin with the next one. After
        the run, values belong to the current epoch again. Histories may ignore all this.
        """

    @contextmanager
    def recording_apart(self, epoch: int) -> Iterator[None]:
        """Record the values of a block under an epoch, but not as values of the run.

        By default, only the epoch is set, with ``_set_epoch``.
        """
        before = self.current_epoch
        self._set_epoch(epoch)
        try:
            yield
        finally:
            self._set_epoch(before)

    def record_means(self, means: Mapping[str, float], source: str) -> None:
        """Record the means of losses and logged values, under names that nothing else may use in the epoch.

        Only ``InMemoryRunHistory`` checks that.

        Args:
            source: a description of what was averaged
        """
        for name, value in means.items():
            self.update_metric(name, value)

    def shorten(self, counts: Mapping[str, int]) -> None:  # noqa: B027
        """Keep only the first values of some metrics, and all values of the others. Histories may ignore it.

        Args:
            counts: the number of values to keep, by name; 0 deletes a metric
        """

    @abstractmethod
    def reset(self) -> None:
        """Delete all metrics and return to epoch 1."""

    def to_dict(self) -> dict[str, list[MetricValue]]:
        """Return the values of every metric by name, oldest first, as copies."""
        return {name: list(self.get_metric_values(name)) for name in self.get_metric_names()}

    def rows(self, first_epoch: int = 0) -> list[Row]:
        """Return a dict for each epoch, with ``epoch`` and the last value of every metric recorded in it.

        The results of ``Trainer.evaluate()`` after a run are in the row of the last epoch, except for metrics that the
        run itself has recorded.

        Args:
            first_epoch: leave out the epochs before this one, at no cost; assumes that values were recorded in the
                order of their epochs

        Raises:
            TypeError: if this kind of history does not know the epochs of its values
        """
        raise self._does_not_know_epochs("rows")

    def curves(self, metrics: Iterable[str] | None = None) -> dict[str, tuple[list[int], list[MetricValue]]]:
        """Return the epochs and values of metrics, by name, oldest first, as copies.

        The results of ``Trainer.evaluate()`` after a run are left out, unless you name a metric that has no other
        values.

        Args:
            metrics: names of the metrics; ``None`` for all that the run has recorded

        Raises:
            ValueError: if a metric was never recorded
            TypeError: if this kind of history does not know the epochs of its values
        """
        raise self._does_not_know_epochs("curves")

    def _does_not_know_epochs(self, method: str) -> TypeError:
        return TypeError(f"{type(self).__name__} has no {method}() of its own. Derive it from InMemoryRunHistory.")

    def to_dataframe(self) -> pd.DataFrame:
        """Return ``rows()`` as a ``pandas.DataFrame`` indexed by epoch. Needs the extra ``dataframe``."""
        pandas = import_extra("pandas", "dataframe", "to_dataframe()")
        return pandas.DataFrame(self.rows(), columns=dict.fromkeys(["epoch", *self])).set_index("epoch")

    def plot(self, path: str | os.PathLike[str] | None = None, metrics: Iterable[str] | None = None) -> Figure:
        """Plot every metric over the epochs, with the training and evaluation curves of a metric in one panel.

        Marks the best value of an evaluation if it is known which values are better. Needs the extra ``plot``.

        Args:
            path: file for the plot, in the format of its suffix (``.png``, ``.pdf``, ``.svg``); ``None`` does not save
                it
            metrics: names of the metrics to plot; ``None`` for all that the run has recorded (see ``curves()``)

        Raises:
            ValueError: if nothing has been recorded
        """
        plots = PLOTS.get("RunHistory.plot", ImportError)
        return plots.plot_curves(self.curves(metrics), path, self.directions)

    def __getitem__(self, metric_name: str) -> Sequence[MetricValue]:
        if metric_name not in self:
            raise KeyError(_no_values_message(metric_name, self))
        return self.get_metric_values(metric_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.get_metric_names())

    def __contains__(self, metric_name: object) -> bool:
        return metric_name in list(self.get_metric_names())

    def __len__(self) -> int:
        return len(set(self.get_metric_names()))

    def keys(self) -> list[str]:
        """Return the names of the metrics, as ``dict(history)`` needs them."""
        return list(self)

    def items(self) -> list[tuple[str, Sequence[MetricValue]]]:
        """Return the names of the metrics with their values."""
        return [(name, self[name]) for name in self]

    def __bool__(self) -> bool:
        return True  # so that `history or default` keeps an empty history

    def _repr_html_(self) -> str | None:
        """Return a table of the epochs for notebooks, or ``None``: they then show the text."""
        return None if HISTORY_TABLE.content is None else HISTORY_TABLE.content(self)

    def __repr__(self) -> str:
        latest = (f"{name}={format_metric(self.get_latest_metric(name))}" for name in self)
        return join_wrapped(f"{type(self).__name__}(", latest, ")")


def shorten_to(history: RunHistory, counts: Mapping[str, int]) -> None:
    """Delete what a history has recorded since ``count_values()`` returned these counts."""
    history.shorten({**dict.fromkeys(history.get_metric_names(), 0), **counts})


def count_values(history: RunHistory) -> dict[str, int]:
    """Return the number of values of each metric in a history, by name."""
    return {name: len(history.get_metric_values(name)) for name in history.get_metric_names()}


def counts_before_growth(history: RunHistory, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the earlier number of values, from ``count_values()``, of each metric that has more values now."""
    return {name: counts.get(name, 0) for name, now in count_values(history).items() if now > counts.get(name, 0)}


class NewMetrics:
    """The metrics that were recorded since the last ``take()``.

    Attributes:
        counts: the number of values of each metric that were taken or skipped
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def skip(self, history: RunHistory) -> None:
        """Skip all values that have been recorded so far."""
        self.counts = count_values(history)

    def follow(self, history: RunHistory) -> None:
        """Forget values that are no longer in the history, which may have been reset."""
        existing = count_values(history)
        self.counts = {name: min(count, existing.get(name, 0)) for name, count in self.counts.items()}

    def take(self, history: RunHistory, passing: Iterable[str] = ()) -> Row:
        """Return the latest values of the metrics that are new, by name.

        Args:
            passing: metrics whose new values the history will remove again, so that they do not count as taken
        """
        before = self.counts
        self.skip(history)
        names = [name for name, count in self.counts.items() if count > before.get(name, 0)]
        self.counts |= {name: before.get(name, 0) for name in passing if name in self.counts}
        return {name: history.get_latest_metric(name) for name in names}


class InMemoryRunHistory(RunHistory):
    """A ``RunHistory`` that keeps everything in memory, with export to a dict, a table and a plot."""

    metric_name_prefix: str = ""
    current_epoch: int = 1
    _is_between_epochs = False

    def __init__(self) -> None:
        InMemoryRunHistory.reset(self)  # not self.reset(): a subclass's own may need attributes that do not exist yet

    def reset(self) -> None:
        self.current_epoch = 1
        self._metrics: dict[str, list[MetricValue]] = {}
        self._epochs: dict[str, list[int]] = {}
        self._apart: dict[str, set[int]] = {}  # indices of values from outside a run, by metric
        self._is_apart = False
        self._is_between_epochs = False
        self._source = ""  # source of the values being recorded, if they are means of losses
        self._sources: dict[str, tuple[int, str]] = {}  # epoch and source of the latest value, by metric

    def get_metric_names(self) -> KeysView[str]:
        """Return the names of all metrics, in the order of their first record; supports set operations."""
        return dict.fromkeys(self._metrics).keys()

    def get_metric_values(self, metric_name: str) -> list[MetricValue]:
        return list(self._metrics.get(metric_name, ()))

    def get_latest_metric(self, metric_name: str) -> MetricValue:
        values = self._metrics.get(metric_name)
        if not values:
            raise ValueError(_no_values_message(metric_name, self))
        return values[-1]

    def update_metric(self, metric_name: str, metric_value: MetricValue) -> None:
        if not isinstance(metric_name, str):
            raise TypeError(f"metric_name={metric_name!r} must be the name of a metric, a string.")
        if metric_value is None:
            raise TypeError(
                f"metric_value=None is not a value of {metric_name!r}. Omit the call if there is none, or record "
                "float('nan')."
            )
        name = f"{self.metric_name_prefix}{metric_name}"
        if name == "epoch":  # code for pytorch-accelerated may record it
            warn_outside(
                "The metric 'epoch' is left out of tables and files, whose column of epochs has this name. Record it "
                "under another name."
            )
        self._check_source(name)
        if self._is_apart:
            self._apart.setdefault(name, set()).add(len(self._metrics.get(name, ())))
        self._metrics.setdefault(name, []).append(metric_value)
        self._epochs.setdefault(name, []).append(self._epoch_of_values)

    def record_means(self, means: Mapping[str, float], source: str) -> None:
        before, self._source = self._source, source
        try:
            super().record_means(means, source)
        finally:
            self._source = before

    def _check_source(self, name: str) -> None:
        """Check that a name is not used for both a loss and another metric in an epoch."""
        epoch, source = self._sources.get(name, (0, ""))
        if epoch == self._epoch_of_values and source != self._source:
            raise ValueError(
                f"Both the run itself, as a loss or a logged value, and something else record the metric {name!r}, so "
                f"epoch {epoch} would have two values of it. Record the other one under another name."
            )
        self._sources[name] = self._epoch_of_values, self._source

    @property
    def _epoch_of_values(self) -> int:
        """The epoch to which values belong that are recorded now."""
        return max(self.current_epoch - self._is_between_epochs, 1)

    def delete_metric(self, metric_name: str) -> None:
        self.get_latest_metric(metric_name)
        del self._metrics[metric_name], self._epochs[metric_name]
        self._apart.pop(metric_name, None)
        self._sources.pop(metric_name, None)

    def shorten(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            if name not in self._metrics:  # deleted since
                continue
            if not count:
                self.delete_metric(name)
                continue
            del self._metrics[name][count:], self._epochs[name][count:]
            self._apart.get(name, set()).intersection_update(range(count))

    def set_metric_name_prefix(self, prefix: str = "") -> None:
        self.metric_name_prefix = prefix

    def _increment_epoch(self) -> None:
        self.current_epoch += 1
        self._is_between_epochs = False

    def _set_epoch(self, epoch: int) -> None:
        self.current_epoch = epoch

    def set_between_epochs(self, is_between: bool) -> None:
        self._is_between_epochs = is_between

    @contextmanager
    def recording_apart(self, epoch: int) -> Iterator[None]:
        before = self._is_apart, self._is_between_epochs
        self._is_apart, self._is_between_epochs = True, False
        try:
            with super().recording_apart(epoch):
                yield
        finally:
            self._is_apart, self._is_between_epochs = before

    def state_dict(self) -> StateDict:
        """Return everything recorded, and the current epoch."""
        return {
            "current_epoch": self.current_epoch,
            "metrics": self.to_dict(),
            "epochs": {name: list(epochs) for name, epochs in self._epochs.items()},
            "apart": {name: sorted(places) for name, places in self._apart.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Load a state returned by ``state_dict()``."""
        self.current_epoch, self._is_between_epochs = state["current_epoch"], False
        self._metrics = {name: list(values) for name, values in state["metrics"].items()}
        self._epochs = {name: list(epochs) for name, epochs in state["epochs"].items()}
        self._apart = {name: set(places) for name, places in state.get("apart", {}).items()}
        self._sources = {}

    def rows(self, first_epoch: int = 0) -> list[Row]:
        table: dict[int, Row] = {}
        for name, values in self._metrics.items():
            epochs = self._epochs[name]
            first = 0
            if first_epoch:
                later = takewhile(lambda epoch: epoch >= first_epoch, reversed(epochs))
                first = len(epochs) - sum(1 for _ in later)
            apart = self._apart_from_run(name)
            for index, (epoch, value) in enumerate(zip(epochs[first:], values[first:], strict=True), first):
                if index not in apart:
                    table.setdefault(epoch, {"epoch": epoch})[name] = value
        return [table[epoch] | {"epoch": epoch} for epoch in sorted(table)]

    def curves(self, metrics: Iterable[str] | None = None) -> dict[str, tuple[list[int], list[MetricValue]]]:
        if metrics is None:
            recorded = [name for name, values in self._metrics.items() if len(self._apart.get(name, ())) < len(values)]
            metrics = recorded or self._metrics
        else:
            metrics = check_names("metrics", metrics)
        result = {}
        for name in metrics:
            self.get_latest_metric(name)  # raises an error that lists the recorded metrics
            apart = self._apart_from_run(name)
            pairs = zip(self._epochs[name], self._metrics[name], strict=True)
            of_run = [pair for index, pair in enumerate(pairs) if index not in apart]
            result[name] = [epoch for epoch, _ in of_run], [value for _, value in of_run]
        return result

    def _apart_from_run(self, name: str) -> Collection[int]:
        """Return the indices of values recorded by evaluations outside the run, if the metric also has other values."""
        apart = self._apart.get(name, ())
        return apart if len(apart) < len(self._metrics[name]) else ()


def _no_values_message(metric_name: str, history: Iterable[str]) -> str:
    recorded = list(history)
    hint = did_you_mean(str(metric_name), recorded)
    if "eval" in str(metric_name) and not any("eval" in name for name in recorded):
        hint = " There has been no evaluation yet, which follows on_train_epoch_end."
    return (
        f"No values have been recorded for the metric {metric_name!r}.{hint} "
        f"Recorded: {', '.join(recorded) or 'nothing yet'}."
    )
