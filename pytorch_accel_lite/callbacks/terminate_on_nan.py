"""Ending a run whose loss is not finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NoReturn

import torch

from pytorch_accel_lite.base.machine.devices import AsyncCopy, is_asynchronous, to_float
from pytorch_accel_lite.data.sources import BatchData, BatchOutput
from pytorch_accel_lite.data.step_outputs import mean_that_counts
from pytorch_accel_lite.run.ending.stop_errors import NonFiniteLossError
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.run_parts.accumulation import Count

_StepLosses = tuple[int, dict[str, torch.Tensor]]  # the number of a step and its losses


class TerminateOnNaNCallback(TrainerCallback):
    """End the run with ``NonFiniteLossError`` if a loss is infinite or NaN, on all ranks together.

    Other logged numbers may be infinite or NaN. No step waits for the device: losses on a GPU are checked a few steps
    after they were computed, and always by the end of the epoch.

    Attributes:
        triggered: whether a non-finite loss has been seen
    """

    affects_training = False
    #: Steps between checks of losses on a GPU.
    LOOK_EVERY = 8

    def __init__(self) -> None:
        self.triggered = False
        self._run: Run | None = None
        self._clear()

    def _clear(self) -> None:
        self._recent: list[_StepLosses] = []  # since those in self._copied
        self._copied: list[_StepLosses] = []
        self._copy: AsyncCopy | None = None  # the copy of the sum of the losses in self._copied

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self.triggered = False
        self._run = trainer.run
        self._clear()

    def on_train_step_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        run = self._run or trainer.run  # the property would cost a call in each step
        latest = run.loss_trackers["loss"].loss_value
        if isinstance(latest, float) and math.isfinite(latest):
            return  # a loss in host memory has already been read
        losses = {"loss": batch_output["loss"], **batch_output.get("losses", {})}
        if "num_items_in_batch" in batch_output:
            items: Count = batch_output["num_items_in_batch"]
            of_parts = run.loss_trackers.num_items
            losses = {name: mean_that_counts(loss, of_parts.get(name, items)) for name, loss in losses.items()}
        step = trainer.progress.step - 1
        found = step, {name: loss.detach() for name, loss in losses.items()}
        if isinstance(latest, float):
            self._search(trainer, [found])  # a mean over no items is not kept
            return
        self._recent.append(found)
        if step % self.LOOK_EVERY == 0:
            self._look(trainer, losses["loss"].device)

    def _look(self, trainer: TrainerLike, device: torch.device) -> None:
        """Check the losses copied some steps ago, if the copy has arrived, and start to copy those since."""
        if not is_asynchronous(device):  # the mean of the epoch includes those that are dropped
            del self._recent[: -2 * self.LOOK_EVERY]
            return
        if self._copy is not None:
            if not self._copy.has_arrived:
                return
            if not math.isfinite(to_float(self._copy.read())):
                self._search(trainer, self._copied)
        # Copy the sum of the latest losses: a single non-finite loss makes the sum non-finite.
        self._copied, self._recent = self._recent, []
        self._copy = AsyncCopy(torch.stack([losses["loss"] for _, losses in self._copied]).float().sum())

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._search(trainer, [*self._copied, *self._recent])
        self._clear()
        self._check_recorded(trainer, "training", "train_{}_epoch")

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.kind == "training":  # not for evaluate(), which returns its losses
            self._check_recorded(trainer, "evaluation", "eval_{}_epoch", "intermediate_eval_{}")

    def _check_recorded(self, trainer: TrainerLike, phase: str, *formats: str) -> None:
        """Check the means of the loss and of its parts. Other logged numbers may be NaN."""
        recorded = trainer.run.recorded_losses
        names = ["loss", *sorted(trainer.run.loss_trackers.parts)]
        metrics = [form.format(name) for form in formats for name in names]
        losses = {metric: recorded[metric] for metric in metrics if metric in recorded}
        if not all(map(math.isfinite, losses.values())):
            epoch, step = trainer.progress.epoch, trainer.progress.step
            self._terminate(f"The {phase} loss of epoch {epoch} is not finite after step {step}", losses)

    def _search(self, trainer: TrainerLike, steps: Collection[_StepLosses]) -> None:
        if not steps:
            return
        finite = torch.stack([losses["loss"] for _, losses in steps]).isfinite().tolist()
        for is_finite, (step, losses) in zip(finite, steps, strict=True):
            if not is_finite:
                epoch = trainer.progress.epoch
                self._terminate(f"The training loss is not finite in epoch {epoch}, step {step}", losses)

    def _terminate(self, problem: str, losses: Mapping[str, float | torch.Tensor]) -> NoReturn:
        self.triggered = True
        values = ", ".join(f"{name}={float(value)}" for name, value in losses.items())
        raise NonFiniteLossError(
            f"{problem}: {values}. Lower the learning rate, clip the gradients, or inspect the data of this step."
        )
