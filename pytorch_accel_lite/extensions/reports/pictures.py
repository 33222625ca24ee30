"""Pictures of several kinds, as arrays and as PNG: figures of matplotlib, images of PIL, arrays and tensors."""

from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Picture
from pytorch_accel_lite.utils import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

_CHANNELS = (1, 3)


def as_picture(value: object) -> tuple[Picture | None, str]:
    """Return a value as a picture, or ``None`` if it is no picture; and what had to be changed to show it, if anything.

    Arrays and tensors are pictures if they hold bytes or floats and have the shape ``(height, width)``,
    ``(height, width, channels)`` or ``(channels, height, width)`` with 1 or 3 channels. Figures are closed.
    """
    figures, images = sys.modules.get("matplotlib.figure"), sys.modules.get("PIL.Image")
    if figures is not None and isinstance(value, figures.Figure):
        return _of_figure(value), ""
    if images is not None and isinstance(value, images.Image):
        return _of_image(value), ""
    pixels = _pixels_of(value)
    if pixels is None:
        return None, ""
    change = ""
    if pixels.dtype != np.uint8:
        low, high = float(pixels.min()), float(pixels.max())
        if not (low >= 0 and high <= 1):
            change = f"values from {low:.3g} to {high:.3g} are cut off to the range from 0 to 1"
        pixels = np.rint(255 * np.nan_to_num(pixels).clip(0, 1)).astype(np.uint8)
    return _of_image(_pil().fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3))))), change


def _pil() -> ModuleType:
    return import_extra("PIL.Image", "plot", "A picture in ShowOutputsCallback")


def _of_image(image: Image) -> Picture:
    image = image.convert("RGB")
    data = io.BytesIO()
    image.save(data, format="PNG")
    return Picture(np.asarray(image), data.getvalue())


def _of_figure(figure: Figure) -> Picture:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)  # otherwise it would stay in memory, and a notebook would show it again
    return Picture(np.asarray(_pil().open(data).convert("RGB")), data.getvalue())


def _pixels_of(value: object) -> npt.NDArray[np.generic] | None:
    """Return an array or a tensor of bytes or floats with the channels last; ``None`` if the shape does not fit."""
    if not isinstance(value, (torch.Tensor, np.ndarray)) or value.ndim not in (2, 3) or 0 in value.shape:
        return None
    is_tensor = isinstance(value, torch.Tensor)
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu()
        value = (data.float() if data.is_floating_point() else data).numpy()
    if value.dtype != np.uint8 and value.dtype.kind != "f":
        return None
    if value.ndim == 2:
        return np.asarray(value[:, :, None])
    is_last, is_first = value.shape[2] in _CHANNELS, value.shape[0] in _CHANNELS
    if is_first and (is_tensor or not is_last):
        return np.asarray(value.transpose(1, 2, 0))
    return np.asarray(value) if is_last else None
