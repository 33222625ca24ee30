"""Following a metric of a run: its newest value, which values are better, and whether it came."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.utils import did_you_mean

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


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


def _in_words(greater_is_better: bool | None) -> str:
    return "greater is better" if greater_is_better else "smaller is better"


def _described(state: dict[str, Any]) -> str:
    return f"{state['watch_metric']!r} ({_in_words(state['greater_is_better'])})"
