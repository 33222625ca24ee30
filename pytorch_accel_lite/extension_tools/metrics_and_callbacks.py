"""Metrics and events: what callbacks record, when they are due, and callbacks of which others are kinds."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.callbacks.default_callbacks import ADDED_TO_EACH_TRAINER, DEFAULTS, PROGRESS_BARS
from pytorch_accel_lite.callbacks.log_metrics import LogMetricsCallback
from pytorch_accel_lite.callbacks.metric_watcher import MetricWatcher
from pytorch_accel_lite.callbacks.print_progress import epoch_of
from pytorch_accel_lite.data.batch_adapter import TARGET_KEYS
from pytorch_accel_lite.data.sources import BatchData
from pytorch_accel_lite.run.callback_handler import named_callbacks, set_listening
from pytorch_accel_lite.run.events import EVENTS, Failure, Phase, Picture, events_between, keywords_of
from pytorch_accel_lite.run.goodput import describe_fractions
from pytorch_accel_lite.run.intervals import CountedRun, Interval, parse_interval
from pytorch_accel_lite.run.metrics.history import MetricValue, NewMetrics, count_values, shorten_to
from pytorch_accel_lite.run.metrics.metric_checks import ExpectedMetrics
from pytorch_accel_lite.run.metrics.metric_directions import direction_of, improvement, is_loss
from pytorch_accel_lite.run.metrics.metric_panels import best_of, is_monitor, panels_by_metric

__all__ = [
    "ADDED_TO_EACH_TRAINER", "CountedRun", "DEFAULTS", "EVENTS", "ExpectedMetrics", "Failure", "Interval",
    "LogMetricsCallback", "MetricValue", "MetricWatcher", "NewMetrics", "Phase", "Picture", "PROGRESS_BARS", "best_of",
    "count_values", "default_transform", "describe_fractions", "direction_of", "epoch_of", "events_between",
    "improvement", "is_loss", "is_monitor", "keywords_of", "named_callbacks", "panels_by_metric", "parse_interval",
    "set_listening", "shorten_to",
]  # fmt: skip


def default_transform(batch: BatchData, batch_output: Mapping[str, Tree]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predictions and targets of a batch: the default ``transform`` of callbacks that compare them.

    Raises:
        ValueError: if predictions or targets cannot be determined
    """
    outputs = batch_output.get("model_outputs", batch_output)  # an overridden method may return logits directly
    predictions = outputs if isinstance(outputs, torch.Tensor) else _value_of(outputs, ("logits", "predictions"))
    if isinstance(batch, Mapping):
        targets = _value_of(batch, TARGET_KEYS)
    else:
        targets = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if not isinstance(predictions, torch.Tensor) or not isinstance(targets, torch.Tensor):
        raise ValueError(
            f"Cannot find predictions and targets in a model output of type {type(outputs).__name__} and a batch of "
            f"type {type(batch).__name__}. Pass transform=lambda batch, batch_output: (preds, targets)."
        )
    return predictions, targets


def _value_of(values: Tree, names: tuple[str, ...]) -> Tree:
    for name in names:
        result = values.get(name) if isinstance(values, Mapping) else getattr(values, name, None)
        if result is not None:
            return result
    return None
