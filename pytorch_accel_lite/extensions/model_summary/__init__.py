"""Summaries of a model by torchinfo, for ``Trainer.summary()`` and at the start of a run."""

from pytorch_accel_lite.extensions.model_summary.model_summary_callback import ModelSummaryCallback

__all__ = ["ModelSummaryCallback"]
