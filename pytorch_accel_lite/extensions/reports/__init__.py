"""Reports on runs: their pages, their plots, and the cards of their models."""

from pytorch_accel_lite.extending import MODEL_WRITERS
from pytorch_accel_lite.extensions.reports.model_card import ModelCard
from pytorch_accel_lite.extensions.reports.plot_metrics import PlotMetricsCallback
from pytorch_accel_lite.extensions.reports.run_log import RunLogCallback

__all__ = ["ModelCard", "PlotMetricsCallback", "RunLogCallback"]

MODEL_WRITERS["model card"] = ModelCard()
