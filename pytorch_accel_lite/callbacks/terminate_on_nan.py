"""Ending a run whose loss is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch

from pytorch_accel_lite.base.machine import AsyncCopy, is_asynchronous, to_float
from pytorch_accel_lite.base.modules import local_shard
from pytorch_accel_lite.data.outputs import mean_that_counts
from pytorch_accel_lite.data.sources import BatchData, BatchOutput
from pytorch_accel_lite.run.accumulation import Count
from pytorch_accel_lite.run.ending import NonFiniteLossError
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import Run, TrainerLike


class _StepLosses(NamedTuple):
    """The losses of a step.

    Args:
        step: the number of the step
        losses: the losses by name, with 0 for a mean over no items
        raw: the loss as the step has returned it
    """

    step: int
    losses: dict[str, torch.Tensor]
    raw: torch.Tensor


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
        self._has_seen_empty = False  # whether a mean over no items was NaN in this run, and was looked at
        self._clear()

    def _clear(self) -> None:
        self._recent: list[_StepLosses] = []  # since those in self._copied
        self._copied: list[_StepLosses] = []
        self._copy: AsyncCopy | None = None  # the copy of the sum of the losses in self._copied

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self.triggered = self._has_seen_empty = False
        self._run = trainer.run
        self._clear()

    def on_train_step_end(
        self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        run = self._run or trainer.run  # the property would cost a call in each step
        latest = run.loss_trackers["loss"].loss_value
        if isinstance(latest, float) and math.isfinite(latest):
            return  # a loss in host memory has already been read
        raw = batch_output["loss"].detach()
        losses = {"loss": raw, **{name: loss.detach() for name, loss in batch_output.get("losses", {}).items()}}
        if "num_items_in_batch" in batch_output:
            items: Count = batch_output["num_items_in_batch"]
            of_parts = run.loss_trackers.num_items
            losses = {name: mean_that_counts(loss, of_parts.get(name, items)) for name, loss in losses.items()}
        step = trainer.progress.step - 1
        found = _StepLosses(step, losses, raw)
        if isinstance(latest, float):
            self._search(trainer, [found])
            self._check_empty(trainer, step)
            return
        self._recent.append(found)
        if step % self.LOOK_EVERY == 0:
            self._look(trainer, raw.device)

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
        self._copy = AsyncCopy(torch.stack([found.losses["loss"] for found in self._copied]).float().sum())

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

    def _search(self, trainer: TrainerLike, steps: Sequence[_StepLosses]) -> None:
        """End the run if a loss is not finite. A mean over no items is named if the losses are so after it."""
        if not steps or torch.stack([found.losses["loss"] for found in steps]).isfinite().all():
            return
        first = torch.stack([found.raw.reshape(()) for found in steps]).isfinite().tolist().index(False)
        step, losses, _ = steps[first]
        if losses["loss"].isfinite():
            self._terminate_after_empty(trainer, step)
        self._terminate(f"The training loss is not finite in epoch {trainer.progress.epoch}, step {step}", losses)

    def _check_empty(self, trainer: TrainerLike, step: int) -> None:
        """End the run if a mean over no items, which is NaN, has reached a gradient or a weight.

        That depends on the function that computes the loss, so it is looked at once in a run.
        """
        if self._has_seen_empty:
            return
        self._has_seen_empty = True
        parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        shards = [local_shard(t.detach()) for p in parameters for t in (p, p.grad) if t is not None]
        if not all(shard.isfinite().all() for shard in shards if shard.is_floating_point()):
            self._terminate_after_empty(trainer, step)

    def _terminate_after_empty(self, trainer: TrainerLike, step: int) -> NoReturn:
        self.triggered = True
        raise NonFiniteLossError(
            f"The training loss in epoch {trainer.progress.epoch}, step {step} is a mean over no items. It is NaN, and "
            "so are its gradients. Divide by max(items, 1), or return 0 * outputs.sum() as the loss of such a batch."
        )

    def _terminate(self, problem: str, losses: Mapping[str, float | torch.Tensor]) -> NoReturn:
        self.triggered = True
        values = ", ".join(f"{name}={float(value)}" for name, value in losses.items())
        raise NonFiniteLossError(
            f"{problem}: {values}. Lower the learning rate, clip the gradients, or inspect the data of this step."
        )
