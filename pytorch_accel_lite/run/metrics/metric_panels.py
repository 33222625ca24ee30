"""Grouping metrics into panels by name: the same quantity in training and evaluation, the same unit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from pytorch_accel_lite.base.display.escaping import escape_unprintable
from pytorch_accel_lite.run.metrics.metric_directions import best_first, direction_of

#: The value of a metric: usually a number, but a program may record anything.
MetricValue: TypeAlias = Any
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
            label = re.sub("_mib$", "", name.removeprefix(start)).strip("_").replace("_", " ")
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
