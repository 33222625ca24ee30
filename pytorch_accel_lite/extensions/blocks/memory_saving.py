"""Estimating the memory that activation checkpointing would save, from a forward pass with fake tensors."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.autograd.graph import saved_tensors_hooks

from pytorch_accel_lite.extending import TrainerLike
from pytorch_accel_lite.extension_tools.data_and_batches import tensors_in
from pytorch_accel_lite.extension_tools.runs_and_steps import replaced
from pytorch_accel_lite.extensions.blocks.block_forward import BlockForward
from pytorch_accel_lite.extensions.blocks.repeated_blocks import repeated_blocks
from pytorch_accel_lite.utils import format_bytes


class Saving(NamedTuple):
    """The bytes that the repeated blocks of a model keep for the backward pass, besides their inputs.

    Args:
        saved: the number of bytes
        more_computation: the share by which recomputation would increase the operations of a step
    """

    saved: int
    more_computation: float


class KeptByBlocks:
    """Counts the bytes that blocks keep for the backward pass during a forward pass, and the operations of blocks."""

    def __init__(self, model: nn.Module, counter: Any) -> None:
        self._counter = counter
        self._depth = 0
        self._begin = 0
        self._known = {id(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self.flops = 0
        for block in repeated_blocks(model).values():
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(self._leave)

    @property
    def bytes(self) -> int:
        """The bytes that blocks keep."""
        return sum(storage.nbytes() for storage in self._kept.values())

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        self._begin = self._counter.get_total_flops()
        self._inputs = [tensor.untyped_storage() for tensor in tensors_in([list(args), kwargs])]
        self._known |= {id(storage) for storage in self._inputs}

    def _leave(self, *_: object) -> None:
        self._depth -= 1
        self.flops += self._counter.get_total_flops() - self._begin

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is kept for the backward pass."""
        storage = tensor.untyped_storage()
        if self._depth and id(storage) not in self._known:
            self._kept[id(storage)] = storage
        return tensor


def find_saving(trainer: TrainerLike) -> Saving:
    """Return what checkpointing all repeated blocks would save in a step on the current batch."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, so not at the top

    run = trainer.current_run
    assert run.batch is not None
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with fake_tensor.FakeCopyMode(mode):
        model, data = copy.deepcopy((trainer.get_model(keep_torch_compile=False), run.batch.data))
    counter = FlopCounterMode(display=False)
    kept = KeptByBlocks(model, counter)
    hooks = saved_tensors_hooks(kept.note, lambda tensor: tensor)
    fake = replaced(trainer, model=model, compiled_forward=None, current_run=run.derive())
    with torch.enable_grad(), fake, mode, counter, hooks, trainer.accelerator.autocast():
        trainer.calculate_train_batch_loss(data)
    total = 3 * counter.get_total_flops()  # a backward pass takes twice the operations of a forward pass
    return Saving(kept.bytes, kept.flops / total if total else 0.0)


def advise(trainer: TrainerLike) -> str:
    """Return advice to use checkpointing for a step that did not fit; an empty text if the model uses it or cannot."""
    model = trainer.get_model(keep_torch_compile=False)
    uses_it = any(isinstance(vars(part).get("forward"), BlockForward) for part in model.modules())
    if uses_it or trainer.is_sharded or not repeated_blocks(model):
        return ""
    found = find_saving(trainer)
    return (
        f"pass activation_checkpointing=True to the trainer: it would save {format_bytes(found.saved)} of such a batch "
        f"for about {100 * found.more_computation:.0f} % more computation."
    )
