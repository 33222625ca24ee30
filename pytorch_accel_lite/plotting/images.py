"""Pictures of a model's predictions: confusion matrices and contact sheets of images."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pytorch_accel_lite.plotting.figures import GRID, INK, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Largest number of classes for which the counts are legible.
_MOST_WITH_COUNTS = 30


def plot_confusion_matrix(
    predictions: Any, targets: Any, classes: Sequence[str] | None = None, path: str | os.PathLike[str] | None = None
) -> Figure:
    """Plot a confusion matrix, computed and drawn with torchmetrics.

    Colours show the counts; with up to 30 classes, these are written into the cells, too.

    :param predictions: classes of shape ``(samples,)``, or scores of shape ``(samples, classes)`` as from ``predict``
    :param targets: classes of shape ``(samples,)``
    :param classes: names of the classes
    :param path: where to save the picture; ``None`` does not save it
    """
    import torch
    from torchmetrics.functional.classification import multiclass_confusion_matrix
    from torchmetrics.utilities.plot import plot_confusion_matrix as draw_counts

    predictions = torch.as_tensor(predictions)
    targets = torch.as_tensor(targets)
    size = predictions.shape[1] if predictions.ndim == 2 else int(max(predictions.max(), targets.max())) + 1
    size = max(size, len(classes or ()))
    names = list(map(str, classes or range(size)))
    counts = multiclass_confusion_matrix(predictions, targets, size)
    right = int(counts.diagonal().sum())
    side = min(max(0.5 * size, 3.0), 15.0)
    figure = new_figure((side + 1.0, side + 1.0))
    axis = figure.add_subplot()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of tensors that are drawn without a copy
        draw_counts(counts, axis, size <= _MOST_WITH_COUNTS, names, "Blues")
    for text in axis.texts:
        text.set_fontsize(9)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set(fontsize=9, color=INK)
    axis.spines[:].set(color=GRID, visible=True)
    axis.grid(False)  # which matplotlib's settings may turn on
    axis.tick_params(labelsize=8 if size <= _MOST_WITH_COUNTS else 5, color=GRID, labelcolor=INK, labelrotation=0)
    if max(map(len, names)) > 3:
        axis.tick_params("x", labelrotation=45)
    title = f"accuracy {right / len(targets):.1%}: {right:,} of {len(targets):,} samples"
    axis.set_title(title, loc="left", fontsize=10, color=INK)
    return save(figure, path)


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
        axis.imshow(_as_picture(image), cmap="gray")
        axis.set_title(title, fontsize=8.5, color=INK, linespacing=1.3)
        axis.set_axis_off()
    return save(figure, path)


def _as_picture(image: Any) -> np.ndarray[Any, Any]:
    """Return an image as matplotlib shows it: channels last, values outside the range from 0 to 1 rescaled to it."""
    array = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.dtype == np.uint8 or (array.min() >= 0 and array.max() <= 1):
        return array
    return np.asarray((array - array.min()) / max(float(np.ptp(array)), 1e-12))
