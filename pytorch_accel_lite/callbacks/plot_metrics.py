"""Plots of a run in progress: the curves of its metrics, and pictures drawn by a user's function."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytorch_accel_lite.base.environment import import_extra, in_notebook
from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.modules import evaluation_mode
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.randomness import preserving_generators
from pytorch_accel_lite.base.time_budget import TimeBudget
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.checkpoint.files import replacing
from pytorch_accel_lite.plotting import NothingToPlotError, as_picture

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest


class PlotMetricsCallback(TrainerCallback):
    """Plot the metrics after each epoch, to a file and live in a notebook (extra ``plot``).

    Plotting takes at most a fiftieth of the run's time (a tenth in a notebook): epochs are skipped if necessary, but
    the final state is always drawn.

    :param path: picture file, whose suffix (``.png``, ``.svg``, ``.pdf``) sets the format; replaced atomically
    :param metrics: names of the metrics to draw; defaults to all numeric metrics
    :raises ImportError: if matplotlib is not installed
    """

    def __init__(self, path: str | os.PathLike[str] = "metrics.png", metrics: list[str] | None = None) -> None:
        import_extra("matplotlib.figure", "plot", "PlotMetricsCallback")
        self.path = Path(path)
        self.metrics = metrics
        self._display: Any
        self._restart()

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        if request.kind == "training":
            request.claim_path(self, "path", self.path, "curves")

    def _restart(self) -> None:
        self._display = None
        self._is_behind = False
        self._pace = TimeBudget(1 / 10, expected=0.2) if in_notebook() else TimeBudget(1 / 50, expected=0.5)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._restart()

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._is_behind = trainer.accelerator.is_main_process
        if self._pace.is_due:
            self._draw(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._draw(trainer)

    def _draw(self, trainer: TrainerLike) -> None:
        if not self._is_behind:
            return
        self._is_behind = False
        with self._pace.measured():
            try:
                figure = trainer.run_history.plot(metrics=self.metrics)
            except NothingToPlotError:  # yet
                return
            with replacing(self.path) as temporary, temporary.open("wb") as file:
                figure.savefig(file, format=self.path.suffix[1:] or "png")
            if in_notebook():
                self._show(figure)

    def _show(self, figure: Any) -> None:
        """Show the picture in the notebook, replacing the previous one."""
        from IPython.display import Image, display

        data = io.BytesIO()
        figure.savefig(data, format="png")
        picture = Image(data.getvalue())
        if self._display is None:
            self._display = display(picture, display_id=True)
        else:
            self._display.update(picture)


class SnapshotCallback(TrainerCallback):
    """Call your function to draw what the model makes of fixed samples, and save the pictures.

    Pictures are saved as PNG files and sent to every tracker of the trainer. The model is in evaluation mode during the
    call; modes and generators are restored, so training is unaffected. If the function raises an error, it is reported
    once and the run continues.

    :param fn: called as ``fn(model, samples)`` on the first process, without gradients; returns a picture or a dict of
        pictures: a matplotlib figure, a PIL image, or an array or tensor of shape ``(height, width)``,
        ``(height, width, channels)`` or ``(channels, height, width)`` with bytes or values from 0 to 1; other ranges
        are rescaled
    :param samples: passed to ``fn``; a tensor is moved to the device
    :param every_n_epochs: number of epochs between calls
    :param directory: where pictures are saved, as ``NAME-epoch-0001.png``
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], Any],
        samples: Any = None,
        every_n_epochs: int = 1,
        directory: str | os.PathLike[str] = "snapshots",
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn={fn!r} must be callable: it draws a picture from the model and the samples.")
        self.fn = fn
        self.samples = samples
        self.every_n_epochs = check_positive_int("every_n_epochs", every_n_epochs)
        self.directory = Path(directory)
        self._failed = False

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        if request.kind == "training":
            request.claim_path(self, "directory", self.directory, "pictures")

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._failed = False
        trainer.ranks.run_together(lambda: self.directory.mkdir(parents=True, exist_ok=True), only_first=True)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if trainer.progress.epoch % self.every_n_epochs or not trainer.accelerator.is_main_process:
            return
        try:
            pictures = self._draw(trainer)
        except Exception as error:
            if not self._failed:
                reason = f"{type(error).__name__}: {error}"
                trainer.print(f"SnapshotCallback: fn failed; the run continues. {reason}")
            self._failed = True
            return
        for name, picture in pictures.items():
            self._save(picture, self.directory / f"{name}-epoch-{trainer.progress.epoch:04d}.png")
        for callback in trainer.callback_handler:
            if hasattr(callback, "log_images"):
                callback.log_images(trainer, pictures)

    def _draw(self, trainer: TrainerLike) -> dict[str, np.ndarray[Any, Any]]:
        samples = self.samples.to(trainer.device) if isinstance(self.samples, torch.Tensor) else self.samples
        model = trainer.get_model()
        with preserving_generators(), evaluation_mode(model), torch.no_grad():
            drawn = self.fn(model, samples)
        named = drawn if isinstance(drawn, Mapping) else {"snapshot": drawn}
        return {name: _as_bytes(picture) for name, picture in named.items()}

    def _save(self, picture: np.ndarray[Any, Any], path: Path) -> None:
        image = import_extra("PIL.Image", "plot", "SnapshotCallback")
        with replacing(path) as temporary, temporary.open("wb") as file:
            image.fromarray(picture).save(file, format="PNG")


def _as_bytes(picture: Any) -> np.ndarray[Any, Any]:
    """Return a picture as a uint8 array of shape (height, width, 3)."""
    if hasattr(picture, "savefig"):
        image = import_extra("PIL.Image", "plot", "SnapshotCallback")
        data = io.BytesIO()
        picture.savefig(data, format="png")
        picture = image.open(data).convert("RGB")
    array = as_picture(picture)
    if array.dtype != np.uint8:
        array = (array * 255).round().astype(np.uint8)
    return np.repeat(array[:, :, None], 3, axis=2) if array.ndim == 2 else array[:, :, :3]
