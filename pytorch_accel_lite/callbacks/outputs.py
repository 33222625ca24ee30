"""Showing outputs of a model while it is trained."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from pytorch_accel_lite.base.devices import mixed_precision
from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.intervals import Interval, parse_interval
from pytorch_accel_lite.base.modules import preserving_modes
from pytorch_accel_lite.base.randomness import mix, preserving_generators, seed_all
from pytorch_accel_lite.base.unknown_names import suggest_arguments
from pytorch_accel_lite.distributed.gradient_averaging import sync_ddp_buffers
from pytorch_accel_lite.engine.inference import inference
from pytorch_accel_lite.engine.run import TrainerLike

_MAX_SHOWN = 100


@suggest_arguments
class ShowOutputsCallback(TrainerCallback):
    """Show what a function computes with the model at intervals, such as texts generated from fixed prompts.

    The texts are printed, logged to the tracker of a :class:`TrackerCallback`, and shown on the page of a
    :class:`RunLogCallback`. The function is called in evaluation mode, without gradients and in the precision of the
    run. Every process calls it, with random generators of the same states, so that sharded models can compute; only
    the value of the first one is shown. Training is unaffected: its results are the same bits.

    :param function: called with the trainer's model, without wrappers; returns a text, or a dict of texts by name, such
        as the prompt. Other values are shown as ``str`` shows them.
    :param every: an :class:`~pytorch_accel_lite.Interval` between the calls, such as ``"500 updates"``
    :param name: name of the text, if the function returns no dict
    :param show: print the texts
    :ivar shown: what was shown in the run, of the latest 100 times: dicts of the ``update`` and the ``texts`` by name
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        every: str | Interval = "1 epochs",
        *,
        name: str = "outputs",
        show: bool = True,
    ) -> None:
        if not callable(function):
            raise TypeError(f"function={function!r} must be a function of the model, such as lambda model: ...")
        self.function = function
        self.every = parse_interval("every", every)
        self.name = name
        self.show = show
        self.shown: list[dict[str, Any]] = []

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.every.start(trainer.current_run, "every")
        self.shown = []

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._show_if_due(trainer, ends_epoch=False)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._show_if_due(trainer, ends_epoch=True)

    def _show_if_due(self, trainer: TrainerLike, ends_epoch: bool) -> None:
        if self.every.is_due(trainer.current_run, ends_epoch=ends_epoch):
            self.every.advance(trainer.current_run, ends_epoch=ends_epoch)
            update, texts = trainer.progress.update, self._compute(trainer)
            self.shown = [*self.shown, {"update": update, "texts": texts}][-_MAX_SHOWN:]
            if self.show:
                trainer.print(_as_lines(update, texts))
            trainer.call_event("on_outputs", outputs=texts)

    def _compute(self, trainer: TrainerLike) -> dict[str, str]:
        model = trainer.get_model()
        sync_ddp_buffers(trainer.model, trainer.ranks)
        with (
            preserving_generators(),
            preserving_modes(model.modules()),
            inference(trainer),
            mixed_precision(trainer.accelerator),
        ):
            model.eval()
            seed_all(mix(trainer.current_run.data.seed or 0, trainer.progress.update))
            value = self.function(model)
        texts = value if isinstance(value, Mapping) else {self.name: value}
        return {str(name): str(text) for name, text in texts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what was shown."""
        return {"shown": self.shown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`."""
        self.shown = list(state["shown"])


def _as_lines(update: int, texts: Mapping[str, str]) -> str:
    shown = (f"{name}: {text}" for name, text in texts.items())
    return f"Update {update}\n" + "\n".join(textwrap.indent(text, "  ") for text in shown)
