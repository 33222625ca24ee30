"""Which metrics share a panel, by their names: the same quantity in training and evaluation, the same unit."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What the names of monitors begin with, the panel that they share, and its unit.
_MONITORS = (
    ("lr", "learning rate", ""),
    ("gradient_norm", "gradient norm", ""),
    ("clipped_updates", "clipped updates", "share of updates"),
    ("skipped_updates", "skipped updates", "updates"),
    ("loss_scale", "loss scale", ""),
    ("samples_per_second", "throughput", "samples per second"),
    ("items_per_second", "throughput of items", "items per second"),
    ("memory", "memory", "MiB"),
    ("time", "time of an epoch", "seconds"),
)
TIME = "time of an epoch"
_WITH_KIND = re.compile(r"(?:(.+?)_)?(train|eval|evaluation)_(.+)")
_LOSS_OF_AN_EVALUATION = re.compile(r"(.+_)eval_loss(?:_epoch)?")


class NothingToPlotError(ValueError):
    """None of the metrics that are to be plotted has numbers."""


@dataclass
class Curve:
    """A metric over the epochs.

    :param label: what tells it from others of its panel: ``"train"``, ``"eval"``, the name of a dataset ...
    :param epochs: of each value; several of one epoch lie before its end
    :param best: the place of the best value, where that is to be marked
    """

    label: str
    epochs: list[float]
    values: list[float]
    best: int | None = None


@dataclass
class Panel:
    """Curves that share their axes.

    :param unit: of the values, empty for none
    :param is_monitor: they say how the run works, and not how good the model is
    """

    title: str
    unit: str = ""
    is_monitor: bool = False
    curves: list[Curve] = field(default_factory=list)


def panels_of(
    metrics: Mapping[str, tuple[Sequence[int], Sequence[Any]]], directions: Mapping[str, bool | None]
) -> list[Panel]:
    """Sort metrics into panels, those of monitors last; metrics whose values are no numbers are left out.

    :param metrics: by name, the epochs and the values
    :param directions: by name, whether greater values are better, ``None`` where that is not known
    :raises NothingToPlotError: when there are no numbers
    """
    panels: dict[tuple[str, str], Panel] = {}
    places = place_of_each(metrics)
    for name, (epochs, values) in metrics.items():
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            continue
        title, unit, is_monitor, label = places[name]
        panel = panels.setdefault((title, unit), Panel(title, unit, is_monitor))
        best = None if is_monitor or label.endswith("train") else best_of(numbers, direction_of(name, directions))
        panel.curves.append(Curve(label, _spread(epochs), numbers, best))
    if not panels:
        raise NothingToPlotError("There is nothing to plot: no metric with numbers has been recorded yet.")
    order = {title: number for number, (_, title, _) in enumerate(_MONITORS)}
    return sorted(panels.values(), key=lambda panel: order[panel.title] if panel.is_monitor else -1)


def place_of_each(names: Iterable[str]) -> dict[str, tuple[str, str, bool, str]]:
    """Return, by the name of each metric, its panel's title and unit, whether a monitor records it, and its label.

    The evaluations of an averaged model and of several datasets share the panel of the metric: the names of their
    losses tell which prefixes there are.
    """
    names = list(names)
    prefixes = {match[1] for name in names if (match := _LOSS_OF_AN_EVALUATION.fullmatch(name))}
    longest_first = sorted(prefixes, key=len, reverse=True)
    return {name: _monitor(name) or _quality(name, longest_first) for name in names}


def _monitor(name: str) -> tuple[str, str, bool, str] | None:
    for start, title, unit in _MONITORS:
        if name == start or name.startswith(f"{start}_"):
            label = re.sub("_mib$", "", name.removeprefix(start)).strip("_").replace("_", " ")
            label = {"data max": "data, slowest process", "": title, "epoch": title}.get(label, label)
            return title, unit, True, f"group {label}" if label.isdigit() else label
    return None


def _quality(name: str, prefixes: Sequence[str]) -> tuple[str, str, bool, str]:
    plain = name.removesuffix("_epoch")
    match = _WITH_KIND.fullmatch(plain)
    if match:
        before, kind, title = match.groups()
        words = [before, *([kind] if kind != "eval" or not before else [])]
        label = " ".join(word for word in words if word)
    else:
        before = next((prefix for prefix in prefixes if plain.startswith(prefix)), "")
        title = plain.removeprefix(before)
        label = before.strip("_") or "eval"
    return title.replace("_", " "), "", False, label.replace("_", " ")


def direction_of(name: str, directions: Mapping[str, bool | None]) -> bool | None:
    """Return whether greater values of a metric are better; of losses smaller ones are; ``None``: not known."""
    known = directions.get(name)
    return False if known is None and "loss" in name else known


def best_of(values: Sequence[float], greater_is_better: bool | None) -> int | None:
    """Return the place of the best value; ``None`` where the direction is not known, or no value is finite."""
    places = [place for place, value in enumerate(values) if math.isfinite(value)]
    if greater_is_better is None or not places:
        return None
    return (max if greater_is_better else min)(places, key=lambda place: values[place])


def _spread(epochs: Sequence[int]) -> list[float]:
    """Return where values lie on the axis: at the end of their epoch, or in its course when it has several."""
    counts = Counter(epochs)
    seen: Counter[int] = Counter()
    places = []
    for epoch in epochs:
        seen[epoch] += 1
        places.append(epoch - 1 + seen[epoch] / counts[epoch])
    return places


def epoch_ticks(first: float, last: float, most: int = 6) -> list[int]:
    """Return whole epochs to be marked on the axis: the first, the last, and round ones between."""
    begin = math.ceil(first)
    end = max(math.floor(last), begin)
    steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    step = next(step for step in steps if (end - begin) / step <= most - 1)
    between = range(-(-begin // step) * step, end, step)
    ticks = [epoch for epoch in between if min(epoch - begin, end - epoch) >= 0.6 * step]
    return sorted({begin, *ticks, end})
