"""Gradients that are computed again within an update: for optimizers with a closure, as LBFGS, and schemes as SAM."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

import torch

from pytorch_accel_lite.base.batches import BatchOutput
from pytorch_accel_lite.base.inspection import is_ours, is_overridden
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.randomness import capture_generators, preserving_generators, restore_generators
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.distributed.averaging import average_gradients
from pytorch_accel_lite.engine.losses import LossTrackers
from pytorch_accel_lite.engine.restoring import Buffers, replaced
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.engine.training import forward, forward_and_backward
from pytorch_accel_lite.optimizers import attributes
from pytorch_accel_lite.optimizers.gradients import NOTHING, gradient_sync
from pytorch_accel_lite.optimizers.operations import needs_closure, parts_of


class WindowReplay:
    """Keeps the batches of an accumulation window, to go forward and backward with them again."""

    def __init__(self) -> None:
        self._steps: list[tuple[Batch, dict[str, object]]] = []
        self._update = -1  # the number of updates before that of the window

    def forward_and_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput:
        """Make the usual step, and keep its batch and the states of the generators before it."""
        if run.window.sizes is None:
            self._steps.clear()
            self._update = run.progress.update
        self._steps.append((batch, capture_generators()))
        return forward_and_backward(trainer, run, batch)

    def recompute(self, trainer: TrainerLike, run: Run) -> torch.Tensor:
        """Compute the gradients of the window as they were computed before, and return its mean loss."""
        if run.window.sizes is not None or run.progress.update != self._update:
            raise _refusal("no update is under way that it could repeat")
        trainer.optimizer_zero_grad()
        loss = torch.zeros((), device=trainer.device)
        with _restoring_afterwards(trainer, run), torch.enable_grad():
            for number, (batch, generators) in enumerate(self._steps, 1):
                restore_generators(generators)
                run.batch = batch
                is_last = number == len(self._steps)
                with gradient_sync(trainer.accelerator, trainer.model, is_last) if run.window.steps > 1 else NOTHING:
                    loss = loss + self._step(trainer, run, batch)
            if trainer.ranks.world_size > 1:
                if run.averaged_here:
                    average_gradients(run.averaged_here, trainer.ranks)
                loss = trainer.ranks.sum_on_device(loss) / trainer.ranks.world_size
            loss = loss * run.window.finish(trainer.optimizer)
            trainer.clip_gradients()
        return loss

    def _step(self, trainer: TrainerLike, run: Run, batch: Batch) -> torch.Tensor:
        """Add the gradients of a batch, and return its loss, weighted by its share of the window."""
        output = forward(trainer, batch)
        weighed = run.window.scale(output["loss"], *batch.samples(output), output.get("num_items_in_batch"))
        trainer.backward_step(weighed)
        return weighed.detach()


@contextmanager
def _restoring_afterwards(trainer: TrainerLike, run: Run) -> Iterator[None]:
    """Restore what going forward and backward changes besides gradients: each batch has been counted already."""
    before = Buffers([trainer.get_model(), *attributes.modules(trainer).values()])
    counts = {
        "batch": run.batch,
        "loss_trackers": LossTrackers(),
        "step_metrics": dict(run.step_metrics),
        "gradient_norm": run.gradient_norm,
    }
    try:
        with preserving_generators(), replaced(run, **counts):
            yield
    finally:
        before.restore()


def recompute_gradients(self: TrainerLike) -> torch.Tensor:
    """Compute the gradients of the current update again, at the weights as they are now, and return the loss.

    To be called in an overridden ``optimizer_step``, on every process; or given to an optimizer as its closure:
    ``self.optimizer.step(self.recompute_gradients)``. Goes forward and backward with the batches of the accumulation
    window, with the same random numbers, then weighs, averages over the processes and clips, as for the gradients
    before, which are replaced. Losses, own numbers and buffers (the running statistics of batch norm) are left as the
    first pass has made them.

    :return: the mean loss of the window over all processes, a scalar without gradients
    :raises RuntimeError: outside of ``optimizer_step``; or in a run where it does not work: with fp16 (bf16 works),
        sharded models, ``auto_microbatch``, ``SkipFailedBatchesCallback`` or an overridden ``train_step``
    """
    run = self.current_run
    if run.replay is not None:
        loss: torch.Tensor = run.replay.recompute(self, run)
        return loss
    if run.config is not None and self.is_running and (reason := _what_it_does_not_go_with(self, run)):
        raise _refusal(f"it does not go with {reason}")
    raise _refusal("only then the batches of an update are kept, and if a method of the trainer names it")


def _refusal(reason: str) -> RuntimeError:
    return RuntimeError(
        f"recompute_gradients() works in an overridden optimizer_step, in train() and find_lr(): {reason}."
    )


def begin_replay(trainer: TrainerLike, run: Run) -> None:
    """Let a run keep what gradients can be computed from again, if its optimizer or the user's step may need it."""
    overridden = is_overridden(trainer, "optimizer_step")
    parts = parts_of(trainer.optimizer)
    kinds = needs_closure(trainer.optimizer)
    reason = _what_it_does_not_go_with(trainer, run)
    if kinds and reason:
        raise ValueError(
            f"{kinds[0]} computes the gradients of an update several times, which does not go with {reason}."
        )
    if kinds and parts and not overridden:
        raise ValueError(
            f"{kinds[0]} computes the gradients of an update several times, so it cannot step together with others. "
            "Give it alone, or override optimizer_step and step each of trainer.optimizer's parts there."
        )
    if (kinds or (overridden and _uses_recompute_gradients(type(trainer)))) and not reason:
        run.replay = WindowReplay()
        run.special_step = run.replay.forward_and_backward
    if kinds and not parts:
        run.closure = (trainer.recompute_gradients,)


def _uses_recompute_gradients(kind: type) -> bool:
    """Whether the user's own methods name it: only then are batches and generator states kept, which costs time."""
    own = [value for base in kind.__mro__ if not is_ours(base) for value in vars(base).values()]
    methods = [inspect.unwrap(getattr(value, "__func__", value)) for value in own]  # may be decorated
    codes = [getattr(method, "__code__", None) for method in methods]
    return any(recompute_gradients.__name__ in _names_in(code) for code in codes if code is not None)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _what_it_does_not_go_with(trainer: TrainerLike, run: Run) -> str | None:
    has_scaler = trainer.accelerator.scaler is not None
    reasons = {
        "auto_microbatch=True": run.request.auto_microbatch,
        "SkipFailedBatchesCallback": run.request.skips_failed_batches,
        "mixed_precision='fp16', whose scaler unscales gradients once (bf16 works)": has_scaler,
        "a sharded model": trainer.is_sharded,
        "an overridden train_step": run.own_step is not None,
    }
    return next((what for what, applies in reasons.items() if applies), None)
