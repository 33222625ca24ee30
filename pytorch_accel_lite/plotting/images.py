"""Pictures of a model's predictions: confusion matrices and contact sheets of images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pytorch_accel_lite.base.environment import import_extra
from pytorch_accel_lite.plotting.figures import GRID, INK, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Largest number of classes for which the counts are legible.
_MOST_WITH_COUNTS = 30
_LETTER = 0.07  # inches of width


def plot_confusion_matrix(
    predictions: Any, targets: Any, classes: Sequence[str] | None = None, path: str | os.PathLike[str] | None = None
) -> Figure:
    """Plot a confusion matrix, computed with torchmetrics.

    Colours show the fraction of each true class; with up to 30 classes, the counts are written into the cells.

    :param predictions: classes of shape ``(samples,)``, or scores of shape ``(samples, classes)`` as from ``predict``
    :param targets: classes of shape ``(samples,)``
    :param classes: names of the classes
    :param path: where to save the picture; ``None`` does not save it
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
    counts = multiclass_confusion_matrix(predictions, targets, size).cpu().numpy()
    right = int(counts.diagonal().sum())
    title = f"accuracy {right / len(targets):.1%}: {right:,} of {len(targets):,} samples"
    return save(_draw_matrix(counts, names, title), path)


def _draw_matrix(counts: np.ndarray[Any, Any], names: Sequence[str], title: str) -> Figure:
    colours = import_extra("matplotlib.colors", "plot", "plot()")
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    size = len(names)
    side = max(0.36 * size, 2.6) if size <= _MOST_WITH_COUNTS else 5.5
    longest = max(map(len, names))
    for_names = min(_LETTER * longest, 1.5)
    is_upright = longest <= 2 or for_names < side / size - 0.05
    figure = new_figure((side + for_names + 1.45, side + 1.0 + (not is_upright) * for_names))
    axis = figure.add_subplot()
    # The square root makes rare confusions visible.
    picture = axis.imshow(shares, cmap="Blues", norm=colours.PowerNorm(0.5, 0, 1))
    if size <= _MOST_WITH_COUNTS:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.4 else INK
            text = str(counts[row, column])
            axis.text(column, row, text, ha="center", va="center", fontsize=8 - len(text) // 3, color=colour)
    shown = range(0, size, -(-size // 40))
    marked = [names[number] for number in shown]
    axis.set_xticks(shown, marked, rotation=0 if is_upright else 90)
    axis.set_yticks(shown, marked)
    axis.tick_params(labelsize=8 if len(marked) <= 20 else 7, color=INK, labelcolor=INK)
    axis.spines[:].set_color(GRID)
    axis.set_xlabel("predicted", fontsize=9, color=INK)
    axis.set_ylabel("true", fontsize=9, color=INK)
    axis.set_title(title, loc="left", fontsize=10, color=INK)
    bar = figure.colorbar(picture, ticks=(0, 0.05, 0.25, 0.5, 1), format="%.2f", aspect=30)
    bar.outline.set_visible(False)
    bar.set_label("share of the true class", fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7, color=INK, labelcolor=INK)
    return figure


def plot_sheet(
    images: Sequence[Any], titles: Sequence[str], path: str | os.PathLike[str] | None = None, columns: int = 5
) -> Figure:
    """Draw images side by side as a contact sheet.

    :param images: images of shape ``(height, width)``, ``(channels, height, width)`` or ``(height, width, channels)``
    :param titles: a title for each image
    :param path: where to save the picture; ``None`` does not save it
    :param columns: maximum number of images in a row
    """
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = new_figure((columns * 1.8, rows * 2.05 + 0.15))
    for number, (image, title) in enumerate(zip(images, titles, strict=True), 1):
        axis = figure.add_subplot(rows, columns, number)
        picture = as_picture(image)
        axis.imshow(picture, cmap="gray" if picture.ndim == 2 else None)
        axis.set_title(title, fontsize=8.5, color=INK, linespacing=1.3)
        axis.set_axis_off()
    return save(figure, path)


def as_picture(image: Any) -> np.ndarray[Any, Any]:
    """Return an image as an array of shape (height, width) or (height, width, channels), of bytes or from 0 to 1.

    Values outside the range from 0 to 1 are rescaled to it.

    :raises ValueError: if it does not have the shape of an image
    """
    array = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise ValueError(f"A {type(image).__name__} of shape {np.shape(image)} is not an image.")
    if array.dtype == np.uint8:
        return array
    array = array.astype(np.float64)
    low = array.min()
    high = array.max()
    if low >= 0 and high <= 1:
        return array
    return (array - low) / (high - low) if high > low else np.zeros_like(array)
