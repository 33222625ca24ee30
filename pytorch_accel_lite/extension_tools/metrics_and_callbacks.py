"""Metrics and events: what callbacks record, when they are due, and callbacks of which others are kinds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from pytorch_accel_lite.base.display import escape_unprintable
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.callbacks.default_callbacks import ADDED_TO_EACH_TRAINER, DEFAULTS, PROGRESS_BARS
from pytorch_accel_lite.callbacks.log_metrics import LogMetricsCallback
from pytorch_accel_lite.callbacks.metric_watcher import MetricWatcher
from pytorch_accel_lite.callbacks.print_progress import epoch_of
from pytorch_accel_lite.data.batch_adapter import TARGET_KEYS
from pytorch_accel_lite.data.sources import BatchData
from pytorch_accel_lite.run.callback_handler import named_callbacks, set_own_listening
from pytorch_accel_lite.run.events import EVENTS, Failure, Phase, Picture, events_between, keywords_of
from pytorch_accel_lite.run.goodput import describe_fractions
from pytorch_accel_lite.run.history import MetricValue, NewMetrics, count_values, shorten_to
from pytorch_accel_lite.run.intervals import CountedRun, Interval, parse_interval
from pytorch_accel_lite.run.metric_checks import ExpectedMetrics
from pytorch_accel_lite.run.watched_metric import best_first, improvement, is_loss

__all__ = [
    "ADDED_TO_EACH_TRAINER", "CountedRun", "DEFAULTS", "EVENTS", "ExpectedMetrics", "Failure", "Interval",
    "LogMetricsCallback", "MetricValue", "MetricWatcher", "NewMetrics", "Phase", "Picture", "PROGRESS_BARS", "best_of",
    "count_values", "default_transform", "describe_fractions", "direction_of", "epoch_of", "events_between",
    "improvement", "is_loss", "is_monitor", "keywords_of", "named_callbacks", "panels_by_metric", "parse_interval",
    "set_own_listening", "shorten_to",
]  # fmt: skip


#: Title of the panel, and its unit, by prefix of the metrics that describe a run. An extension adds its own.
MONITORS: dict[str, tuple[str, str]] = {
    "lr": ("learning rate", ""),
    "gradient_norm": ("gradient norm", ""),
    "clipped_updates": ("clipped updates", "share of updates"),
    "skipped_updates": ("skipped updates", "updates"),
    "loss_scale": ("loss scale", ""),
    "memory": ("memory", "MiB"),
}
_WITH_KIND = re.compile(r"(?:(.+?)_)?(train|eval|evaluation)_(.+)")
_EVAL_LOSS = re.compile(r"(.+_)eval_loss(?:_epoch)?")


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


def direction_of(name: str, directions: Mapping[str, bool | None]) -> bool | None:
    """Return whether larger values of a metric are better; by default smaller ones for losses, ``None`` for others."""
    direction = directions.get(name)
    return False if direction is None and is_loss(name) else direction


class MetricPanel(NamedTuple):
    """The panel of a metric and its label there.

    Args:
        title: the title of the panel
        unit: the unit of the values; empty for none
        is_monitor: whether the metric describes the run, such as a time or a learning rate, rather than the model
        label: ``"train"``, ``"eval"``, the name of a dataset ...
    """

    title: str
    unit: str
    is_monitor: bool
    label: str


def panels_by_metric(names: Iterable[str]) -> dict[str, MetricPanel]:
    """Return the panel of each metric.

    Evaluations of an averaged model and of several datasets share the metric's panel; the names of their losses reveal
    the prefixes.
    """
    names = list(names)
    prefixes = {match[1] for name in names if (match := _EVAL_LOSS.fullmatch(name))}
    longest_first = sorted(prefixes, key=len, reverse=True)
    return {name: _monitor(name) or _quality(name, longest_first) for name in names}


def is_monitor(name: str) -> bool:
    """Whether a metric describes the run, such as a time or a learning rate, rather than the model."""
    return _monitor(name) is not None


def _monitor(name: str) -> MetricPanel | None:
    for start, (title, unit) in MONITORS.items():
        if name == start or name.startswith(f"{start}_"):
            label = name.removeprefix(start).removesuffix("_mib").strip("_").replace("_", " ")
            label = {"data max": "data, slowest process", "": title, "epoch": title}.get(label, label)
            return MetricPanel(title, unit, True, f"group {label}" if label.isdigit() else escape_unprintable(label))
    return None


def _quality(name: str, prefixes: Sequence[str]) -> MetricPanel:
    name = name.removesuffix("_epoch")
    match = _WITH_KIND.fullmatch(name)
    if match:
        prefix, kind, title = match.groups()
        label = prefix if prefix and kind == "eval" else " ".join(filter(None, (prefix, kind)))
    else:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        title = name.removeprefix(prefix)
        label = prefix.strip("_") or "eval"
    return MetricPanel(
        escape_unprintable(title.replace("_", " ")), "", False, escape_unprintable(label.replace("_", " "))
    )


def best_of(
    values: Sequence[MetricValue], name: str, panel: MetricPanel, directions: Mapping[str, bool | None]
) -> int | None:
    """Return the index of the best value of a metric, which is marked.

    ``None`` for training metrics, if the direction is unknown, or if no value is a finite number.
    """
    greater_is_better = direction_of(name, directions)
    finite = {i: value for i, value in enumerate(values) if isinstance(value, (int, float)) and math.isfinite(value)}
    if panel.label.endswith("train") or greater_is_better is None or not finite:
        return None
    return best_first(finite.items(), greater_is_better)[0][0]
