"""Following a metric of the run history."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_accel_lite.tracking import RunHistory
    from pytorch_accel_lite.trainer import Trainer


class WatchedMetric:
    """Gives each value of a metric once. Epochs without an evaluation have none.

    :ivar seen: how many values have been given or passed over
    """

    def __init__(self, name: str) -> None:
        self.name = name
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
