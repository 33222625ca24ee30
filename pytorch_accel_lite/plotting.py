"""Public path of plots of what a run recorded (extra ``plot``). None needs a display."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import (
    MetricPanel,
    best_of,
    direction_of,
    is_monitor,
    panels_by_metric,
)
from pytorch_accel_lite.extension_tools.texts_and_pages import Column, render
from pytorch_accel_lite.extensions.plots import (
    NothingToPlotError,
    new_figure,
    overlay_style,
    plot_curves,
    plot_range_test,
    plot_schedule,
    plot_sheet,
    svg_overlays,
    svg_panels,
)

__all__ = [
    "Column",
    "MetricPanel",
    "NothingToPlotError",
    "best_of",
    "direction_of",
    "is_monitor",
    "new_figure",
    "overlay_style",
    "panels_by_metric",
    "plot_curves",
    "plot_range_test",
    "plot_schedule",
    "plot_sheet",
    "render",
    "svg_overlays",
    "svg_panels",
]

add_missing_name_errors(__name__)
