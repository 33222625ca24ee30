"""Recomputing gradients within an update, for optimizers with a closure, such as LBFGS, and schemes such as SAM."""

from __future__ import annotations

from typing import Protocol, cast

import torch

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extending import (
    CLOSURE,
    FP16,
    MANUAL,
    MICROBATCHES,
    RECOMPUTED,
    SHARDED,
    SKIPPED_BATCHES,
    BatchOutput,
    Conflict,
    Feature,
    LossTrackers,
    PlainStep,
    Run,
    Snapshot,
    TrainerLike,
    backward,
)
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    average_gradients,
    needs_closure,
    no_sync_within_window,
    other_modules,
    parts_of_optimizer,
)
from pytorch_accel_lite.extension_tools.random_numbers import capture_generators, restore_generators
from pytorch_accel_lite.extension_tools.runs_and_steps import replaced

_NOT_KEPT = "the batches of an update are kept whole"
_CONFLICTS = (
    Conflict(MICROBATCHES, _NOT_KEPT),
    Conflict(SKIPPED_BATCHES, _NOT_KEPT),
    Conflict(FP16, "its scaler unscales gradients once. Use bf16"),
    Conflict(SHARDED, "gradients cannot be averaged again"),
    Conflict(MANUAL, "only the gradients of one loss and one update can be computed again"),
)
_OTHER_OPTIMIZERS = Feature(
    "other optimizers, unless optimizer_step is overridden",
    lambda trainer, run: bool(parts_of_optimizer(trainer.optimizer)) and "optimizer_step" not in run.overridden,
)
_ONLY_ALONE = Conflict(
    _OTHER_OPTIMIZERS,
    "it computes the gradients of an update several times. Give it alone, or step each part of trainer.optimizer in "
    "optimizer_step",
)
_RECOMPUTED = RECOMPUTED.with_conflicts(*_CONFLICTS)  # an error only when recompute_gradients() is called


class _RecomputesGradients(Protocol):
    """A trainer with the method of this extension."""

    def recompute_gradients(self) -> torch.Tensor: ...


class ReplayingStep(PlainStep):
    """Keeps the batches of an accumulation window, to repeat their forward and backward passes."""

    features = (CLOSURE.with_conflicts(*_CONFLICTS, _ONLY_ALONE), _RECOMPUTED)

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        super().__init__(trainer, run)
        if needs_closure(trainer.optimizer) and not parts_of_optimizer(trainer.optimizer):
            self.closure = (cast(_RecomputesGradients, trainer).recompute_gradients,)
        self._steps: list[tuple[Batch, dict[str, object]]] = []
        self._update = -1  # number of updates before the window

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the usual step, and keep its batch and the states of the generators before it."""
        if not run.window.has_gradients:
            self._steps.clear()
            self._update = run.progress.update
        self._steps.append((batch, capture_generators()))
        return super().forward_backward(trainer, run, batch)

    def apply_update(self, trainer: TrainerLike, run: Run) -> None:
        """Update the weights, and forget the batches of the window."""
        super().apply_update(trainer, run)
        self._steps.clear()

    def recompute(self, trainer: TrainerLike, run: Run) -> torch.Tensor:
        """Compute the gradients of the window in the same way as before, and return the mean loss of the window."""
        if run.window.has_gradients or run.progress.update != self._update:
            raise _recompute_error("no update is under way that it could repeat")
        trainer.optimizer_zero_grad()
        loss = torch.zeros((), device=run.device)
        with Snapshot() as before, torch.enable_grad():  # the batches are already counted
            before.keep_buffers([trainer.get_model(), *other_modules(trainer).values()])
            before.keep_generators()
            counts = {"batch": run.batch, "loss_trackers": LossTrackers(), "step_metrics": dict(run.step_metrics)}
            before.enter_context(replaced(run, **counts))
            before.enter_context(replaced(run.training_step, gradient_norm=run.training_step.gradient_norm))
            for number, (batch, generators) in enumerate(self._steps, 1):
                restore_generators(generators)
                run.batch = batch
                is_last = number == len(self._steps)
                with no_sync_within_window(trainer.accelerator, trainer.model, is_last):
                    loss = loss + self._loss(trainer, run, batch)
            if run.ranks.world_size > 1:
                if self.averaged:
                    average_gradients(self.averaged, run.data.ranks)
                loss = run.ranks.sum_on_device(loss) / run.ranks.world_size
            loss = loss * run.window.finish(trainer.optimizer)
            trainer.clip_gradients()
        return loss

    def _loss(self, trainer: TrainerLike, run: Run, batch: Batch) -> torch.Tensor:
        """Add the gradients of a batch, and return its loss, weighted by its share of the window."""
        output = self.forward(trainer, run, batch)
        samples = batch.samples(output)
        weighted = backward(trainer, batch, output, *samples, run.window, trainer.backward_step)
        return weighted.detach().to(output["loss"].dtype)  # numbers of items make it float64, but not on all processes


def recompute_gradients(self: TrainerLike) -> torch.Tensor:
    """Compute the gradients of the current update again, at the current weights, and return the loss.

    Call it in an overridden ``optimizer_step``, on every process, or pass it to an optimizer as its closure:
    ``self.optimizer.step(self.recompute_gradients)``. This repeats the forward and backward passes of the accumulation
    window, with the same random numbers, and replaces the gradients. The new gradients are weighted, averaged over the
    processes and clipped as before. The events of the backward pass fire again. Losses, logged values and buffers
    (running statistics of batch norm) are left as they were after the first pass.

    Returns:
        the mean loss of the window over all processes, a scalar without gradients

    Raises:
        RuntimeError: outside ``optimizer_step``, or in a run with fp16 (bf16 works), sharded models,
            ``auto_microbatch``, ``SkipFailedBatchesCallback`` or an overridden ``train_step``
    """
    run = self.current_run
    if isinstance(run.training_step, ReplayingStep):
        return run.training_step.recompute(self, run)
    if run.config is not None and self.is_running and (conflict := _RECOMPUTED.find_conflict(self, run)):
        raise _recompute_error(f"it does not work with {conflict.other.name}")
    raise _recompute_error(
        "only then the batches of an update are kept, and if a method of the trainer names it, or its class has "
        "recomputes_gradients = True"
    )


def _recompute_error(reason: str) -> RuntimeError:
    return RuntimeError(
        f"recompute_gradients() works in an overridden optimizer_step, in train() and find_lr(): {reason}."
    )
