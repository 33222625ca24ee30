"""Following a metric of the run history."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_accel_lite.tracking import RunHistory
    from pytorch_accel_lite.trainer import Trainer


class WatchedMetric:
    """Gives each value of a metric once. Epochs without an evaluation have none.

    :param name: its name in the run history
    :param greater_is_better: whether larger values are better
    :ivar seen: how many values have been given or passed over
    """

    def __init__(self, name: str, greater_is_better: bool = False) -> None:
        self.name = name
        self.greater_is_better = greater_is_better
        self.seen = 0

    def start(self, history: RunHistory) -> None:
        """Pass over the values of earlier runs."""
        self.seen = len(history.get_metric_values(self.name))

    def new_value(self, trainer: Trainer, mid_epoch: bool = False) -> float | None:
        """Return the newest value, ``None`` when there has been no other since the last.

        :param mid_epoch: the epoch's evaluation is still to come
        :raises ValueError: when there is none although one was due; the message lists the metrics that there are
        """
        history = trainer.run_history
        count = len(history.get_metric_values(self.name))
        is_to_come = mid_epoch or (bool(trainer.eval_dataloaders) and not trainer.evaluation_is_due)
        if count == self.seen and (count or is_to_come):
            return None
        self.seen = count
        return float(history.get_latest_metric(self.name))

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
        if (self.name, self.greater_is_better) != (theirs["watch_metric"], theirs["greater_is_better"]):
            warnings.warn(
                f"{type(owner).__name__} begins again: it watches {_described(mine)}, and its training state is of "
                f"{_described(theirs)}. Give callbacks of one kind in the order in which they were saved.",
                stacklevel=3,
            )
            return False
        self.seen = theirs["seen"]
        return True


def _described(state: dict[str, Any]) -> str:
    return f"{state['watch_metric']!r} ({'greater' if state['greater_is_better'] else 'smaller'} is better)"
