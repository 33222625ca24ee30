"""The seam for what draws the methods ``plot()``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy.typing as npt
import torch

from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.run.metrics.metric_panels import MetricValue

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plots(Protocol):
    """Draws what a run has recorded and tried, for the methods ``plot()``."""

    def plot_curves(
        self,
        curves: Mapping[str, tuple[Sequence[int], Sequence[MetricValue]]],
        path: str | os.PathLike[str] | None = None,
        directions: Mapping[str, bool | None] | None = None,
    ) -> Figure:
        """Plot metrics over epochs."""

    def plot_range_test(
        self,
        lrs: Sequence[float],
        losses: Sequence[float],
        smoothed: Sequence[float],
        suggestion: float | None,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Plot the losses of a learning rate range test."""

    def plot_sheet(
        self,
        images: Sequence[npt.ArrayLike | torch.Tensor],
        titles: Sequence[str],
        path: str | os.PathLike[str] | None = None,
        columns: int = 5,
    ) -> Figure:
        """Draw images side by side."""


#: What draws plots.
PLOTS: Slot[Plots] = Slot("plots")
