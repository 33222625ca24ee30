"""Plots of what a run recorded (extra ``plot``). Nothing here needs a display."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pytorch_accel_lite.schedulers.preview import schedule_values
from pytorch_accel_lite.utils import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The label "" is that of a metric that is neither of training nor of evaluation by its name.
_COLOURS = {"train": "#1f77b4", "eval": "#d95f02", "": "#d95f02"}

# What monitors record of one kind shares a panel: time_data, time_forward ...
_FAMILIES = ("time", "gradient_norm", "memory", "lr")


class NothingToPlotError(ValueError):
    """None of the metrics that are to be plotted has numbers."""


def new_figure(size: tuple[float, float]) -> Figure:
    """Return an empty figure, which a notebook shows when it is the value of a cell.

    :param size: width and height in inches
    """
    figures = import_extra("matplotlib.figure", "plot", "plot()")

    class Shown(figures.Figure):  # type: ignore[misc, name-defined]
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    return Shown(figsize=size, layout="constrained", dpi=120)


def plot_curves(
    curves: Mapping[str, tuple[Sequence[int], Sequence[Any]]], path: str | os.PathLike[str] | None = None
) -> Figure:
    """Draw metrics over epochs, one panel for each metric, with its train and eval curve together.

    :param curves: by metric name, the epochs and the values; values that are no numbers are left out
    :param path: where to save the picture; ``None``: not saved
    :raises NothingToPlotError: when there are no numbers
    """
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
        raise NothingToPlotError("There is nothing to plot: no metric with numbers has been recorded yet.")

    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure: Figure = new_figure((4.6 * columns, 3.4 * rows))
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
            axis.legend(frameon=False, fontsize="small" if len(lines) > 4 else None)
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
    figure: Figure = new_figure((6.4, 4))
    axis = figure.subplots()
    axis.plot(lrs, losses, color="#1f77b4", alpha=0.3, label="loss")
    axis.plot(lrs, smoothed, color="#1f77b4", label="smoothed")
    if suggestion is not None:
        axis.axvline(suggestion, color="#d95f02", linestyle="--", label=f"suggestion {suggestion:.2g}")
    low = min(smoothed)
    high = max(smoothed)
    axis.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))  # single losses may be far out
    axis.set_xscale("log")
    axis.set(xlabel="learning rate", ylabel="loss", title="learning rate range test")
    return _finish(figure, axis, path)


def plot_schedule(
    create_scheduler_fn: Callable[..., Any],
    num_updates: int,
    lr: float | Sequence[float] = 1.0,
    num_epochs: int = 1,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Draw the learning rates that a schedule will give, without training.

    :param create_scheduler_fn: as for ``train()``; placeholders in a ``functools.partial`` are filled in
    :param num_updates: optimizer updates in the run
    :param lr: the optimizer's learning rate, or one for each parameter group
    :param num_epochs: epochs of the run, for placeholders that count them, and for timm's schedulers in epochs
    :param path: where to save the picture; ``None``: not saved
    """
    curves = schedule_values(create_scheduler_fn, num_updates, lr, num_epochs)
    figure: Figure = new_figure((6.4, 3.6))
    axis = figure.subplots()
    for number, values in enumerate(curves):
        axis.plot(range(1, num_updates + 1), values, label=f"group {number}" if len(curves) > 1 else None)
    axis.set(xlabel="update", ylabel="learning rate", title="learning rate schedule")
    axis.ticklabel_format(axis="y", scilimits=(-2, 3))
    return _finish(figure, axis, path)


def plot_confusion_matrix(
    predictions: Any, targets: Any, classes: Sequence[str] | None = None, path: str | os.PathLike[str] | None = None
) -> Figure:
    """Draw how often each class was taken for each.

    The colour is the share of a target's samples; the numbers are counts. Computed by torchmetrics.

    :param predictions: classes of shape ``(samples,)``, or scores of shape ``(samples, classes)``, as ``predict`` gives
    :param targets: classes of shape ``(samples,)``
    :param classes: the names of the classes
    :param path: where to save the picture; ``None``: not saved
    """
    import torch
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    predictions = torch.as_tensor(predictions)
    targets = torch.as_tensor(targets)
    if len(predictions) != len(targets):
        raise ValueError(f"There are {len(predictions)} predictions, but {len(targets)} targets.")
    size = predictions.shape[1] if predictions.ndim == 2 else int(max(predictions.max(), targets.max())) + 1
    size = max(size, len(classes or ()))
    names = [str(number) for number in range(size)] if classes is None else list(classes)
    if len(names) != size:
        raise ValueError(f"classes has {len(names)} names, but there are {size} classes.")
    counts = multiclass_confusion_matrix(predictions, targets, size).cpu()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    side = min(max(3.6, 0.42 * size + 1.6), 16)
    figure: Figure = new_figure((side, side))
    axis = figure.subplots()
    axis.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    small = 8 if size <= 20 else 5
    for row in range(size):
        for column in range(size):
            if counts[row, column]:
                colour = "white" if shares[row, column] > 0.6 else "#333333"
                axis.text(
                    column, row, str(int(counts[row, column])), ha="center", va="center", fontsize=small, color=colour
                )
    axis.set_xticks(range(size), names, rotation=90 if max(map(len, names)) > 2 else 0, fontsize=small + 1)
    axis.set_yticks(range(size), names, fontsize=small + 1)
    right = int(counts.diag().sum())
    axis.set(
        xlabel="prediction", ylabel="target", title=f"{right} of {len(targets)} right ({right / len(targets):.1%})"
    )
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def plot_sheet(
    images: Sequence[Any], titles: Sequence[str], path: str | os.PathLike[str] | None = None, columns: int = 5
) -> Figure:
    """Draw images side by side.

    :param images: each of shape ``(height, width)``, ``(channels, height, width)`` or ``(height, width, channels)``
    """
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure: Figure = new_figure((1.9 * columns, 2.3 * rows))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, image, title in zip(axes, images, titles, strict=False):
        picture = as_picture(image)
        axis.imshow(picture, cmap="gray" if picture.ndim == 2 else None)
        axis.set_title(title, fontsize=8)
    for axis in axes:
        axis.set_axis_off()
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def as_picture(image: Any) -> np.ndarray[Any, Any]:
    """Return an image as an array of shape (height, width) or (height, width, 3), its values from 0 to 1.

    Values that are not all in that range are stretched to it.

    :raises ValueError: when it has no such shape
    """
    array = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise ValueError(f"A {type(image).__name__} of shape {np.shape(image)} is no image.")
    if array.dtype == np.uint8:
        return array
    array = array.astype(np.float64)
    low = array.min()
    high = array.max()
    if low >= 0 and high <= 1:
        return array
    return (array - low) / (high - low) if high > low else np.zeros_like(array)


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
    for family in _FAMILIES:
        if name.startswith(f"{family}_"):
            return family, name.removeprefix(f"{family}_")
    plain = name.removesuffix("_epoch")
    for label in ("train", "eval"):
        before, found, after = plain.partition(f"{label}_")
        if found and (not before or before.endswith("_")):
            return after, f"{before}{label}"
    return plain, ""
