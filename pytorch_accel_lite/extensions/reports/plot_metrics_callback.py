"""Drawing the curves of a run while it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pytorch_accel_lite.checkpoint import file_path, replacing
from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_names, optional
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Interval, parse_interval, set_own_listening
from pytorch_accel_lite.extension_tools.texts_and_pages import in_notebook
from pytorch_accel_lite.extensions.plots import NothingToPlotError, new_figure
from pytorch_accel_lite.extensions.reports.time_budget import TimeBudget
from pytorch_accel_lite.utils import import_extra


class PlotMetricsCallback(TrainerCallback):
    """Plot the metrics after each epoch, to a file and live in a notebook (extra ``plot``).

    Plotting takes at most a fiftieth of the run's time (a tenth in a notebook): epochs are skipped if necessary, but
    the plot is always drawn at the end. With ``every``, it is drawn at that interval instead.

    Args:
        path: file of the plot, whose suffix (``.png``, ``.svg``, ``.pdf``) sets the format; replaced atomically
        metrics: names of the metrics to draw, each once it has a value; defaults to all numeric metrics
        every: an ``Interval`` between plots, such as ``"10 minutes"``, also within epochs

    Raises:
        ImportError: if matplotlib is not installed
    """

    affects_training = False
    arguments_may_differ = True

    def __init__(
        self,
        path: str | os.PathLike[str] = "metrics.png",
        metrics: list[str] | None = None,
        *,
        every: str | Interval | None = None,
    ) -> None:
        import_extra("matplotlib.figure", "plot", "PlotMetricsCallback")
        self.path = file_path("path", path)
        _check_format(self.path)
        self.metrics = optional(check_names, "metrics", metrics)
        self.every = optional(parse_interval, "every", every)
        self._restart()

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        """Check that no other callback writes to the same path, and that there will be something to draw."""
        request.claim_path(self, "path", self.path, "curves")
        for name in self.metrics or ():
            if name not in trainer.run_history:  # an earlier run may have recorded it
                request.metrics.require(f"PlotMetricsCallback(metrics={self.metrics!r})", name)

    def _restart(self) -> None:
        self._display: Any = None
        self._is_outdated = False
        self._budget = TimeBudget(1 / 10, expected=0.2) if in_notebook() else TimeBudget(1 / 50, expected=0.5)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Forget the plots and times of an earlier run."""
        self._restart()
        if self.every is not None:
            self.every.start(trainer.run, "every")
        set_own_listening(trainer, self, self.every is not None, "on_train_step_checkpoint")

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Draw if ``every`` says so."""
        if self.every is not None and self.every.is_due(trainer.run):
            self.every.advance(trainer.run)
            self._is_outdated = trainer.accelerator.is_main_process
            self._draw(trainer)

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Draw if ``every`` says so, or if there is time for it."""
        self._is_outdated = trainer.accelerator.is_main_process
        if self.every is not None:
            self.on_train_step_checkpoint(trainer)
        elif self._budget.is_due:
            self._draw(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Draw the final state."""
        self._draw(trainer)

    def _draw(self, trainer: TrainerLike) -> None:
        if not self._is_outdated:
            return
        self._is_outdated = False
        history, metrics = trainer.run_history, self.metrics
        if metrics is not None:
            metrics = [name for name in metrics if name in history]
        with self._budget.measured():
            try:
                figure = history.plot(metrics=metrics)
            except NothingToPlotError:  # no metrics yet
                return
            with replacing(self.path) as temporary, temporary.open("wb") as file:
                figure.savefig(file, format=_format_of(self.path))
            if in_notebook():
                self._show(figure)

    def _show(self, figure: Any) -> None:
        """Show the plot in the notebook, replacing the previous one."""
        from IPython.display import display

        if self._display is None:
            self._display = display(figure, display_id=True)
        else:
            self._display.update(figure)


def _format_of(path: Path) -> str:
    return path.suffix[1:].lower() or "png"


def _check_format(path: Path) -> None:
    """Check that matplotlib can write the format of a path.

    Raises:
        ValueError: if it cannot; lists the formats
    """
    formats = new_figure((1, 1)).canvas.get_supported_filetypes()
    if _format_of(path) not in formats:
        raise ValueError(
            f"path={os.fspath(path)!r} must end in a format of pictures: {', '.join(f'.{name}' for name in formats)}."
        )
