"""Plots of what a run recorded (extra ``plot``). Nothing here needs a display."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.utils import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The label "" is that of a metric that is neither of training nor of evaluation by its name.
_COLOURS = {"train": "#1f77b4", "eval": "#d95f02", "": "#d95f02"}


def plot_curves(
    curves: Mapping[str, tuple[Sequence[int], Sequence[Any]]], path: str | os.PathLike[str] | None = None
) -> Figure:
    """Draw metrics over epochs, one panel for each metric, with its train and eval curve together.

    :param curves: by metric name, the epochs and the values; values that are no numbers are left out
    :param path: where to save the picture; ``None``: not saved
    """
    figures = import_extra("matplotlib.figure", "plot", "plot()")
    ticker = import_extra("matplotlib.ticker", "plot", "plot()")
    panels: dict[str, dict[str, tuple[Sequence[int], list[float]]]] = {}
    for name, (epochs, values) in curves.items():
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            continue
        panel, label = _panel_of(name)
        panels.setdefault(panel, {})[label] = (epochs, numbers)
    if not panels:
        raise ValueError("There is nothing to plot: no metric with numbers has been recorded yet.")

    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure: Figure = figures.Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained", dpi=120)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (panel, lines) in zip(axes, panels.items(), strict=False):
        for label, (epochs, numbers) in lines.items():
            marker = "o" if len(numbers) < 30 else None
            axis.plot(epochs, numbers, label=label or "eval", marker=marker, markersize=3, color=_COLOURS.get(label))
        axis.set_title(panel.replace("_", " "))
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if list(lines) != [""]:
            axis.legend(frameon=False)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def plot_range_test(
    lrs: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggestion: float | None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw the losses of a learning rate range test."""
    figures = import_extra("matplotlib.figure", "plot", "plot()")
    figure: Figure = figures.Figure(figsize=(6.4, 4), layout="constrained", dpi=120)
    axis = figure.subplots()
    axis.plot(lrs, losses, color="#1f77b4", alpha=0.3, label="loss")
    axis.plot(lrs, smoothed, color="#1f77b4", label="smoothed")
    if suggestion is not None:
        axis.axvline(suggestion, color="#d95f02", linestyle="--", label=f"suggestion {suggestion:.2g}")
    low, high = min(smoothed), max(smoothed)
    axis.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))  # single losses may be far out
    axis.set_xscale("log")
    axis.set(xlabel="learning rate", ylabel="loss", title="learning rate range test")
    return _finish(figure, axis, path)


def _finish(figure: Figure, axis: Any, path: str | os.PathLike[str] | None) -> Figure:
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def _panel_of(name: str) -> tuple[str, str]:
    """Split a metric's name into its panel and its label there: ``clean_eval_loss_epoch``: ``loss``, ``clean_eval``."""
    plain = name.removesuffix("_epoch")
    for label in ("train", "eval"):
        before, found, after = plain.partition(f"{label}_")
        if found and (not before or before.endswith("_")):
            return after, f"{before}{label}"
    return plain, ""
