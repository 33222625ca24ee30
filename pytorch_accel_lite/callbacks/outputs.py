"""Recording numbers that steps return besides the loss."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accel_lite.base.batches import KNOWN_OUTPUTS, is_number
from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.text import did_you_mean

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest


class LogOutputsCallback(TrainerCallback):
    """Record numbers that steps return besides the loss, as means over the samples of each epoch and evaluation.

    A step may return more than it must: ``{"loss": loss, "kl": kl}``. Numbers, and tensors without dimensions, are
    recorded like those of ``trainer.log``: as ``train_kl_epoch``, ``eval_kl_epoch`` or ``evaluation_kl``.

    :param names: keys of the values to record; tensors with dimensions are averaged. Training steps must return all of
        them, evaluations may leave some out. By default, all numbers are recorded.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise TypeError(f"names={names!r} must be a list of keys, such as ['kl'], or None for all numbers.")
        self.names = None if names is None else list(names)

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        names = self.names or []
        request.metrics.record(self, [f"train_{name}_epoch" for name in names], and_others=self.names is None)
        request.metrics.record(self, [f"eval_{name}_epoch" for name in names], in_evaluation=True, and_others=True)

    def on_train_step_end(self, trainer: TrainerLike, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        missing = [name for name in self.names or () if name not in batch_output]
        if missing:
            raise ValueError(
                f"LogOutputsCallback: the training step returned no {missing[0]!r}."
                f"{did_you_mean(missing[0], batch_output)} It returned {', '.join(map(repr, batch_output))}."
            )
        for output in [batch_output] if trainer.logical is None else trainer.logical.each_output():
            self._log(trainer, output)

    def on_eval_step_end(self, trainer: TrainerLike, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        self._log(trainer, batch_output)

    def _log(self, trainer: TrainerLike, output: dict[str, Any]) -> None:
        names = self.names
        if names is None:
            names = [name for name, value in output.items() if name not in KNOWN_OUTPUTS and is_number(value)]
        for name in names:
            value = output.get(name)
            if not is_number(value) and not isinstance(value, (torch.Tensor, NoneType)):
                raise TypeError(f"LogOutputsCallback: {name!r} is of type {type(value).__name__}, not a number.")
            if value is not None:
                trainer.log(name, value, weight=output["batch_size"])
