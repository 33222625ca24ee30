"""Metrics and events: what callbacks record, when they are due, and callbacks of which others are kinds."""

from pytorch_accel_lite.callbacks.default_callbacks import DEFAULTS, PROGRESS_BARS
from pytorch_accel_lite.callbacks.log_metrics import LogMetricsCallback
from pytorch_accel_lite.callbacks.metric_watcher import MetricWatcher
from pytorch_accel_lite.callbacks.print_progress import epoch_of
from pytorch_accel_lite.data.predictions_and_targets import default_transform
from pytorch_accel_lite.run.callback_handler import named_callbacks, set_listening
from pytorch_accel_lite.run.events import EVENTS, Failure, Phase, Picture, events_between, keywords_of
from pytorch_accel_lite.run.goodput import describe_fractions
from pytorch_accel_lite.run.history import MetricValue, NewMetrics, count_values
from pytorch_accel_lite.run.intervals import CountedRun, Interval, parse_interval
from pytorch_accel_lite.run.metric_checks import ExpectedMetrics
from pytorch_accel_lite.run.metric_directions import direction_of, improvement
from pytorch_accel_lite.run.metric_panels import best_of, is_monitor, panels_by_metric

__all__ = [
    "CountedRun", "DEFAULTS", "EVENTS", "ExpectedMetrics", "Failure", "Interval", "LogMetricsCallback", "MetricValue",
    "MetricWatcher", "NewMetrics", "Phase", "Picture", "PROGRESS_BARS", "best_of", "count_values", "default_transform",
    "describe_fractions", "direction_of", "epoch_of", "events_between", "improvement", "is_monitor", "keywords_of",
    "named_callbacks", "panels_by_metric", "parse_interval", "set_listening",
]  # fmt: skip
