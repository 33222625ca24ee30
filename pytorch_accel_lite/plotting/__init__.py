"""Plots of what a run recorded (extra ``plot``). None needs a display."""

from pytorch_accel_lite.base.templates import Column, render
from pytorch_accel_lite.plotting.curves import overlay_style, plot_curves, svg_overlays, svg_panels
from pytorch_accel_lite.plotting.figures import new_figure
from pytorch_accel_lite.plotting.images import plot_sheet
from pytorch_accel_lite.plotting.panels import (
    MetricPanel,
    NothingToPlotError,
    best_of,
    direction_of,
    is_monitor,
    panels_by_metric,
)
from pytorch_accel_lite.plotting.schedules import plot_range_test, plot_schedule

__all__ = [
    "Column", "MetricPanel", "NothingToPlotError", "best_of", "direction_of", "is_monitor", "new_figure",
    "overlay_style", "panels_by_metric", "plot_curves", "plot_range_test", "plot_schedule", "plot_sheet", "render",
    "svg_overlays", "svg_panels",
]  # fmt: skip
