"""Ending a run on a loss that is NaN or infinite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch

from pytorch_accel_lite.base.devices import AsyncCopy, is_asynchronous, to_float
from pytorch_accel_lite.base.events import NonFiniteLossError, TrainerCallback
from pytorch_accel_lite.base.protocols import TrainerLike

_StepLosses = tuple[int, dict[str, torch.Tensor]]  # the number of a step and its losses


class TerminateOnNaNCallback(TrainerCallback):
    """End the run with :class:`NonFiniteLossError` if a loss is infinite or NaN, on all ranks together.

    Numbers that steps log beside the loss may be either. No step waits for the device: losses on a GPU are checked a
    few steps after they were computed, and always by the end of the epoch.

    :ivar triggered: whether a non-finite loss has been seen
    """

    #: Steps between checks of losses on a GPU.
    LOOK_EVERY = 8

    def __init__(self) -> None:
        self.triggered = False
        self._clear()

    def _clear(self) -> None:
        self._recent: deque[_StepLosses] = deque(maxlen=2 * self.LOOK_EVERY)
        self._copied: list[_StepLosses] = []
        self._copy: AsyncCopy | None = None  # of the sum of the losses of self._copied

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.triggered = False
        self._clear()

    def on_train_step_end(self, trainer: TrainerLike, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        latest = trainer.current_run.loss_trackers["loss"].loss_value
        if isinstance(latest, float) and math.isfinite(latest):
            return  # the loss is in host memory and has already been read
        losses = {"loss": batch_output["loss"], **batch_output.get("losses", {})}
        step = trainer.progress.step - 1
        self._recent.append((step, {name: loss.detach() for name, loss in losses.items()}))
        if isinstance(latest, float):
            self._search(trainer, self._recent)
        elif step % self.LOOK_EVERY == 0 and is_asynchronous(losses["loss"].device):  # others wait for the epoch's end
            self._look_late(trainer)

    def _look_late(self, trainer: TrainerLike) -> None:
        """Read the copy started some steps ago, if it has arrived, and start another."""
        if self._copy is not None:
            if not self._copy.has_arrived:
                return
            if not math.isfinite(to_float(self._copy.read())):
                self._search(trainer, self._copied)
        # Sums the latest steps: a single non-finite loss makes the sum non-finite.
        self._copied = list(self._recent)
        self._copy = AsyncCopy(torch.stack([losses["loss"] for _, losses in self._copied]).float().sum())

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._search(trainer, [*self._copied, *self._recent])
        self._clear()
        self._check_recorded(trainer, "training", "train_{}_epoch")

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if "evaluation_loss" not in trainer.current_run.recorded_losses:  # evaluate() returns what it finds
            self._check_recorded(trainer, "evaluation", "eval_{}_epoch", "intermediate_eval_{}")

    def _check_recorded(self, trainer: TrainerLike, phase: str, *formats: str) -> None:
        """Check the mean of the loss, and those of its parts: what else steps have logged may well be NaN."""
        recorded = trainer.current_run.recorded_losses
        names = ["loss", *sorted(trainer.current_run.loss_trackers.parts)]
        metrics = [form.format(name) for form in formats for name in names]
        losses = {metric: recorded[metric] for metric in metrics if metric in recorded}
        if not all(map(math.isfinite, losses.values())):
            progress = trainer.progress
            where = f"The {phase} loss of epoch {progress.epoch} is not finite after step {progress.step}"
            self._terminate(where, losses)

    def _search(self, trainer: TrainerLike, steps: Collection[_StepLosses]) -> None:
        if not steps:
            return
        finite = torch.stack([losses["loss"] for _, losses in steps]).isfinite().tolist()
        for is_finite, (step, losses) in zip(finite, steps, strict=True):
            if not is_finite:
                where = f"The training loss is not finite in epoch {trainer.progress.epoch}, step {step}"
                self._terminate(where, losses)

    def _terminate(self, where: str, losses: Mapping[str, Any]) -> NoReturn:
        self.triggered = True
        listed = ", ".join(f"{name}={float(value)}" for name, value in losses.items())
        raise NonFiniteLossError(
            f"{where}: {listed}. Lower the learning rate, clip the gradients, or inspect the data of this step."
        )
