"""Accumulating the gradients of a sharded model with no more communication than an update needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from pytorch_accel_lite.batches import BatchOutput
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.loops.training import forward_and_backward
from pytorch_accel_lite.sharding.layout import infos_of, is_hybrid

if TYPE_CHECKING:
    from pytorch_accel_lite.run import Run
    from pytorch_accel_lite.trainer import Trainer

    Step = Callable[[Trainer, Run, Batch], BatchOutput | None]


def accumulating_shards(model: nn.Module, steps: int) -> Step | None:
    """Return a step that reduces the gradients of modules sharded by ``fully_shard`` only at the end of a window.

    Gradients of a single dimension are reduced once, and kept whole until then. Those of two dimensions (HSDP) are
    divided over the first group in every step, which takes less memory, and reduced over the groups once.

    :param steps: number of batches in a window
    :return: ``None`` if the usual step will do
    """
    from torch.distributed.fsdp import FSDPModule

    parts: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        return None
    reduces = True

    def set_reduction(ends_window: bool) -> None:
        nonlocal reduces
        if ends_window != reduces:
            reduces = ends_window
            for part in parts:
                if any(map(is_hybrid, infos_of(part))):
                    part.set_requires_all_reduce(ends_window, recurse=False)
                else:
                    part.set_requires_gradient_sync(ends_window, recurse=False)

    for part in parts:  # a run that failed within a window leaves them otherwise
        part.set_requires_gradient_sync(True, recurse=False)
    if steps == 1:
        return None

    def step(trainer: Trainer, run: Run, batch: Batch) -> BatchOutput:
        set_reduction(trainer.accelerator.sync_gradients)
        return forward_and_backward(trainer, run, batch)

    return step
