"""Reports on runs and models: pages and plots of runs, outputs of models during training, and model cards."""

from pytorch_accel_lite.extending import COMPANION_WRITERS
from pytorch_accel_lite.extensions.reports.model_card import ModelCard
from pytorch_accel_lite.extensions.reports.plot_metrics_callback import PlotMetricsCallback
from pytorch_accel_lite.extensions.reports.run_log_callback import RunLogCallback
from pytorch_accel_lite.extensions.reports.show_outputs_callback import ShowOutputsCallback

__all__ = ["ModelCard", "PlotMetricsCallback", "RunLogCallback", "ShowOutputsCallback"]

COMPANION_WRITERS["model card"] = ModelCard()
