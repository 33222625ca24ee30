"""Showing outputs of a model during training."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

from torch import nn

from pytorch_accel_lite.checkpoint import as_file_name, folder_path
from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_text, checked_calls, warn_outside
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Interval, Picture, parse_interval
from pytorch_accel_lite.extension_tools.modules_and_devices import mixed_precision, preserving_modes
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import sync_ddp_buffers
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.random_numbers import derive_seed, preserving_generators, seed_all
from pytorch_accel_lite.extension_tools.runs_and_steps import inference
from pytorch_accel_lite.extension_tools.states_and_files import write_bytes
from pytorch_accel_lite.extension_tools.texts_and_pages import in_notebook
from pytorch_accel_lite.extensions.reports.pictures import as_picture

_MAX_SHOWN = 100


class Shown(TypedDict):
    """The outputs shown after an update: texts, or paths for pictures, by name; and the paths of the pictures alone."""

    update: int
    texts: dict[str, str]
    pictures: NotRequired[dict[str, str]]


@checked_calls("__init__")
class ShowOutputsCallback(TrainerCallback):
    """Show what a function computes with the model at intervals: texts generated from fixed prompts, or pictures.

    Texts are printed, logged to the tracker of a ``TrackerCallback``, and shown on the page of a ``RunLogCallback``.
    Pictures are written as PNG files and shown in notebooks, on the page, and in trackers that take images
    (TensorBoard, Weights & Biases, MLflow, Aim, ClearML, SwanLab). Other trackers get the path of the file. A picture
    is a figure of matplotlib, an image of PIL, or an array or tensor of bytes, or floats from 0 to 1, of the shape
    ``(height, width)``, ``(height, width, 3)`` or ``(3, height, width)``; to show the numbers of an array instead,
    return its ``tolist()``. Pictures need the extra ``plot``.

    The function is called in evaluation mode, without gradients, in the precision of the run. Every process calls it,
    with the same states of random generators, so that sharded models can compute; only the value of the first one is
    shown. Training is unaffected: its results are bitwise the same.

    Args:
        function: called with the trainer's model, without wrappers; returns a text or a picture, or a dict of them by
            name, such as the prompt. Other values are shown as ``str`` shows them.
        every: an ``Interval`` between the calls, such as ``"500 updates"``
        name: name of the text or picture, unless the function returns a dict
        show: print the texts, and show pictures in notebooks
        folder: where pictures are written, as ``name-000500.png`` after update 500; created when the first picture is
            written

    Attributes:
        shown: the outputs shown in the run, the latest 100 times: dicts with the ``update``, the ``texts`` by name (for
            pictures, their paths) and, if there are pictures, the paths of ``pictures`` by name
    """

    affects_training = False

    def __init__(
        self,
        function: Callable[[nn.Module], object],
        every: str | Interval = "1 epochs",
        *,
        name: str = "outputs",
        show: bool = True,
        folder: str | os.PathLike[str] = "outputs",
    ) -> None:
        if not callable(function):
            raise TypeError(f"function={function!r} must be a function of the model, such as lambda model: ...")
        self.function = function
        self.every = parse_interval("every", every)
        self.name = check_text("name", name)
        self.show = show
        self.folder = folder_path("folder", folder)
        self.shown: list[Shown] = []
        self._has_warned = False

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self.every.start(trainer.run, "every")
        self.shown = []

    def on_update_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._show_if_due(trainer, ends_epoch=False)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._show_if_due(trainer, ends_epoch=True)

    def _show_if_due(self, trainer: TrainerLike, ends_epoch: bool) -> None:
        if self.every.is_due(trainer.run, ends_epoch=ends_epoch):
            self.every.advance(trainer.run, ends_epoch=ends_epoch)
            update, values = trainer.progress.update, self._compute(trainer)
            pictures = self._find_pictures(values)
            paths = {name: os.fspath(self.folder / f"{as_file_name(name)}-{update:06d}.png") for name in pictures}
            if pictures and trainer.accelerator.is_main_process:
                for name, picture in pictures.items():
                    write_bytes(Path(paths[name]), picture.png)
            texts = {name: paths[name] if name in paths else str(value) for name, value in values.items()}
            shown: Shown = {"update": update, "texts": texts}
            if paths:
                shown["pictures"] = paths
            self.shown = [*self.shown, shown][-_MAX_SHOWN:]
            if self.show:
                trainer.print(_as_lines(update, texts))
                self._display_in_notebook(trainer, pictures)
            trainer.call_event("on_outputs", outputs=texts, pictures=pictures)

    def _find_pictures(self, values: Mapping[str, object]) -> dict[str, Picture]:
        """Return the values that are pictures, by name, and warn once if one cannot be shown unchanged."""
        pictures = {}
        for name, value in values.items():
            picture, change = as_picture(value)
            if picture is not None:
                pictures[name] = picture
            if change and not self._has_warned:
                self._has_warned = True
                warn_outside(
                    f"ShowOutputsCallback shows {name!r} as a picture, whose {change}. Scale them yourself, or return "
                    "a list (tolist()) to show numbers."
                )
        return pictures

    def _display_in_notebook(self, trainer: TrainerLike, pictures: Mapping[str, Picture]) -> None:
        if pictures and in_notebook() and trainer.accelerator.is_main_process:
            from IPython.display import Image, display  # notebooks have it

            display(*(Image(data=picture.png) for picture in pictures.values()))

    def _compute(self, trainer: TrainerLike) -> dict[str, object]:
        model = trainer.get_model()
        sync_ddp_buffers(trainer.model, trainer.ranks)
        with (
            preserving_generators(),
            preserving_modes(model.modules()),
            inference(trainer),
            mixed_precision(trainer.accelerator),
        ):
            model.eval()
            seed_all(derive_seed(trainer.run.data.seed or 0, trainer.progress.update))
            value = self.function(model)
        values = value if isinstance(value, Mapping) else {self.name: value}
        return {str(name): part for name, part in values.items()}

    def state_dict(self) -> StateDict:
        """Return what was shown."""
        return {"shown": self.shown}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        self.shown = list(state["shown"])


def _as_lines(update: int, texts: Mapping[str, str]) -> str:
    shown = (f"{name}: {text}" for name, text in texts.items())
    return f"Update {update}\n" + "\n".join(textwrap.indent(text, "  ") for text in shown)
