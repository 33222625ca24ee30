"""The plain training step: a forward and backward pass on each batch, an update at the end of each window."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from pytorch_accel_lite.base.modules import mixed_precision
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.outputs import as_scalars, check_loss, complete_output, total_loss
from pytorch_accel_lite.data.sources import BatchData, BatchOutput
from pytorch_accel_lite.distributed.gradient_sync import average_gradients
from pytorch_accel_lite.run.accumulation import GradientWindow
from pytorch_accel_lite.run.notes_and_checks_seam import RUN_CHECKS
from pytorch_accel_lite.run.run import Run, Step, TrainerLike
from pytorch_accel_lite.run.scheduler_steps import step_after_update
from pytorch_accel_lite.run.trained_objects import buffers_beside_model, parameters_not_in_model
from pytorch_accel_lite.steps.clipping import clip_keeping_norm, unscale
from pytorch_accel_lite.steps.skipped_updates import step_or_tell_scaler


class PlainStep(Step):
    """The plain training step: one loss, one backward pass, one update. Other kinds of steps replace parts of it.

    Args:
        trainer: the trainer
        run: the run whose batches the step trains on

    Attributes:
        averaged: parameters whose gradients ``DistributedDataParallel`` does not average
        synced_buffers: buffers that ``DistributedDataParallel`` does not synchronise, in the loss function and
            attributes, by module and name
        must_examine_batch: whether the first batch is still to be checked for mistakes in the loss
    """

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        super().__init__()
        self.averaged: list[nn.Parameter] = []
        self.synced_buffers: list[tuple[nn.Module, str]] = []
        self.must_examine_batch = False

    def begin_replicas(self, trainer: TrainerLike, run: Run) -> None:
        """Start with the same values on all processes, and note what each update must equalise."""
        if run.ranks.world_size == 1:
            return
        self.synced_buffers = buffers_beside_model(trainer)
        if not trainer.is_sharded:
            self.averaged = parameters_not_in_model(trainer.model, trainer.optimizer)
            run.ranks.copy_from_first(self.averaged)

    def begin(self, trainer: TrainerLike, run: Run) -> None:
        """Have the first batch examined when it comes, on one process."""
        self.must_examine_batch = run.ranks.rank == 0

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the forward and backward pass on a batch and track its losses."""
        output = self.forward(trainer, run, batch)
        samples, total = run.count_step(output, batch)  # first: callbacks may change the loss in the backward pass
        backward(trainer, batch, output, samples, total, run.window, trainer.backward_step)
        return output

    def forward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput:
        """Return the output of a training batch, including its loss."""
        compute = trainer.compiled_forward or trainer.calculate_train_batch_loss
        if trainer.accelerator.native_amp:
            with mixed_precision(trainer.accelerator):
                output = compute(batch.data)
        else:  # entering an empty context costs time
            output = compute(batch.data)
        output = complete_output(output, batch.data, batch.num_samples, "calculate_train_batch_loss", training=True)
        trackers = run.loss_trackers
        trackers.latest_batch = batch, output["batch_size"]  # inlines note_batch_size()
        if trackers.unweighed:
            trackers.weigh_logged()
        if self.must_examine_batch and not batch.is_filler:
            self.must_examine_batch = False
            for check in RUN_CHECKS.of_first_batch:
                check(trainer, batch, output)
        return output

    def apply_update(self, trainer: TrainerLike, run: Run) -> None:
        """Average, weigh and clip the gradients of a window, step the optimizer and the schedule, and clear.

        Clipping sees the gradients of all processes and of the whole window, and callbacks what clipping leaves. The
        schedule follows the update, unless that was skipped.
        """
        if self.averaged and run.data.ranks.world_size > 1:
            average_gradients(self.averaged, run.data.ranks)
        if self.synced_buffers:
            run.ranks.copy_from_first(getattr(part, name) for part, name in self.synced_buffers)
        listeners = trainer.callback_handler.listeners
        run.window.finish(trainer.optimizer)
        self.skips_update, self.can_skip_update = False, True
        if run.request.gradient_clip_value is not None or "clip_gradients" in run.overridden:
            clip_keeping_norm(trainer, run)
        else:
            trainer.clip_gradients()
        if listeners["on_optimizer_step_start"]:
            if trainer.accelerator.scaler is not None:
                unscale(trainer)
            trainer.call_event("on_optimizer_step_start")
        if trainer.accelerator.scaler is not None:
            step_or_tell_scaler(trainer)
        elif not self.skips_update:
            trainer.optimizer_step()
        self.can_skip_update = False
        run.progress.update += 1
        prepared = trainer.prepared_model
        may_overflow = prepared is not None and not prepared.is_plain  # inlines was_skipped(), to save calls
        was_skipped = self.count_if_skipped(trainer, run) if self.skips_update or may_overflow else False
        if trainer.scheduler is not None and not was_skipped:
            step_after_update(trainer)
        trainer.optimizer_zero_grad()
        if listeners["on_optimizer_step_end"]:
            trainer.call_event("on_optimizer_step_end")


def backward(
    trainer: TrainerLike,
    batch: Batch,
    output: BatchOutput,
    samples: int,
    total: int,
    window: GradientWindow,
    backward_step: Callable[[torch.Tensor], None],
) -> torch.Tensor:
    """Accumulate the gradients of a loss, weighted by its share of the window. Every kind of step calls this.

    Args:
        samples: number of samples in this process's batch
        total: number of samples in the batches of all processes

    Returns:
        the weighted loss
    """
    listeners = trainer.callback_handler.listeners
    if listeners["on_backward_start"]:
        _fire_backward_start(trainer, batch.data, output)
    weighted = window.scale(output["loss"], samples, total, output.get("num_items_in_batch"))
    backward_step(weighted)
    if listeners["on_backward_end"]:
        step = trainer.current_run.progress.step
        trainer.call_event("on_backward_end", batch=batch.data, batch_output=output, step=step)
    return weighted


def _fire_backward_start(trainer: TrainerLike, data: BatchData, output: BatchOutput) -> None:
    """Fire ``on_backward_start``. Gradients are computed for the loss that callbacks leave in the output.

    A callback may replace the loss, or change it in place; with several losses, also some of them.
    """
    loss: torch.Tensor = output["loss"]
    version = loss._version
    losses = dict(output.get("losses", {}))  # these references keep the ids unique
    parts = _identities(losses)
    trainer.call_event("on_backward_start", batch=data, batch_output=output, step=trainer.current_run.progress.step)
    if output.get("loss") is not loss:
        check_loss(output, "on_backward_start", training=True)
        output["loss"] = total_loss(as_scalars(output["loss"]))
    elif losses and loss._version == version and _identities(output.get("losses", {})) != parts:
        check_loss({"loss": output["losses"]}, "on_backward_start", training=True)
        output["loss"] = total_loss(as_scalars(output["losses"]))


def _identities(losses: Mapping[str, torch.Tensor]) -> list[tuple[str, int, int]]:
    """Return the identities and versions of losses, which differ if a loss is replaced or changed in place."""
    return [(name, id(loss), loss._version) for name, loss in losses.items() if isinstance(loss, torch.Tensor)]
