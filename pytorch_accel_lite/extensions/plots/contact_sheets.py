"""Contact sheets of images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pytorch_accel_lite.extension_tools.texts_and_pages import escape_unprintable
from pytorch_accel_lite.extensions.plots.figure_style import INK, as_written, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_sheet(
    images: Sequence[npt.ArrayLike | torch.Tensor],
    titles: Sequence[str],
    path: str | os.PathLike[str] | None = None,
    columns: int = 5,
) -> Figure:
    """Draw images side by side as a contact sheet.

    Args:
        images: images of shape ``(height, width)``, ``(channels, height, width)`` or ``(height, width, channels)``
        titles: a title for each image
        path: where to save the picture; ``None`` does not save it
        columns: maximum number of images in a row
    """
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = new_figure((columns * 1.8, rows * 2.05 + 0.15))
    for number, (image, title) in enumerate(zip(images, titles, strict=True), 1):
        axis = figure.add_subplot(rows, columns, number)
        axis.imshow(_as_picture(image), cmap="gray")
        as_written(axis.set_title(escape_unprintable(title, keeps="\n"), fontsize=8.5, color=INK, linespacing=1.3))
        axis.set_axis_off()
    return save(figure, path)


def _as_picture(image: npt.ArrayLike | torch.Tensor) -> npt.NDArray[np.generic]:
    """Return an image as matplotlib shows it: channels last, values outside the range from 0 to 1 rescaled to it."""
    array = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.dtype == np.uint8 or (array.min() >= 0 and array.max() <= 1):
        return array
    return np.asarray((array - array.min()) / max(float(np.ptp(array)), 1e-12))
