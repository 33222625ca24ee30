"""Plots of what a run recorded (extra ``plot``). None needs a display."""

from pytorch_accel_lite.base.templates import Column, render
from pytorch_accel_lite.plotting.curves import overlay_style, plot_curves, svg_overlays
from pytorch_accel_lite.plotting.figures import new_figure
from pytorch_accel_lite.plotting.images import plot_sheet
from pytorch_accel_lite.plotting.panels import NothingToPlotError, is_monitor
from pytorch_accel_lite.plotting.schedules import plot_range_test, plot_schedule

__all__ = [
    "Column", "NothingToPlotError", "is_monitor", "new_figure", "overlay_style", "plot_curves", "plot_range_test",
    "plot_schedule", "plot_sheet", "render", "svg_overlays",
]  # fmt: skip
