"""The seam for the metrics of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.run.events import TrainerCallback

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

#: Creates the callback that records the metrics of ``Trainer(metrics=...)`` in each evaluation.
METRICS: Slot[Callable[[str | Sequence[str] | Metric | MetricCollection | Mapping[str, Metric | str]], TrainerCallback]]
METRICS = Slot("metrics")
