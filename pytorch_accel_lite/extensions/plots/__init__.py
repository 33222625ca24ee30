"""Plots of what a run recorded and tried, for the methods ``plot()`` and for pages (extra ``plot``)."""

from pytorch_accel_lite.extending import PLOTS, Plots
from pytorch_accel_lite.extensions.plots.contact_sheets import plot_sheet
from pytorch_accel_lite.extensions.plots.figure_style import new_figure
from pytorch_accel_lite.extensions.plots.learning_rate_plots import plot_range_test, plot_schedule
from pytorch_accel_lite.extensions.plots.metric_curves import overlay_style, plot_curves, svg_overlays, svg_panels
from pytorch_accel_lite.extensions.plots.panels import NothingToPlotError

__all__ = [
    "NothingToPlotError",
    "new_figure",
    "overlay_style",
    "plot_curves",
    "plot_range_test",
    "plot_schedule",
    "plot_sheet",
    "svg_overlays",
    "svg_panels",
]


class MatplotlibPlots:
    """The plots of the methods ``plot()``."""

    plot_curves = staticmethod(plot_curves)
    plot_range_test = staticmethod(plot_range_test)
    plot_sheet = staticmethod(plot_sheet)


_plots: Plots = MatplotlibPlots()
PLOTS.fill(_plots)
