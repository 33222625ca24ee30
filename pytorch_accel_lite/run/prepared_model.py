"""A model and an optimizer as Accelerate has prepared them."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.modules import PLAIN_JOBS, is_sharded, unwrap
from pytorch_accel_lite.base.quantised_weights import is_frozen_and_quantised, quantised_entries
from pytorch_accel_lite.optimizers.combined_optimizers import AcceleratedCombinedOptimizer
from pytorch_accel_lite.optimizers.optimizer_parts import TrainerOptimizer, is_created, parts_of_optimizer

_PREPARED_TOGETHER = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}  # these have optimizers of their own


class PreparedModel:
    """A model and an optimizer prepared for training: placed on the device, wrapped, in mixed precision.

    A model that the user has sharded with ``fully_shard`` is left unchanged.

    Args:
        accelerator: the ``Accelerator`` that prepares
        model: the trainer's model, not prepared
        optimizer: the trainer's optimizer, not prepared; ``None`` without one
        training: whether to prepare for training; otherwise only place the model and apply mixed precision

    Attributes:
        trains: whether optimizers that have modes are in training mode
        is_sharded: whether the weights are sharded over the processes, so that no process can compute alone
        outlives_runs: whether it is kept at the end of a run, because its weights exist in no other form
        is_plain: whether Accelerate adds nothing to the backward pass and the optimizer
        model: the prepared model: the model itself, or its wrapper for several processes
        optimizer: the optimizer to step: the user's own if Accelerate adds nothing to it, otherwise the prepared one
        has_run: whether the prepared model has been called, and not just the bare one inside it
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: TrainerOptimizer, training: bool) -> None:
        self._as_passed = model, optimizer
        self.trains = False
        self._forward = vars(model).get("forward")
        # Accelerate's lists of prepared objects. free_memory() would also drop objects that other code has prepared,
        # and collect garbage, which takes longer than many runs.
        self._counts_before = [(held, len(held)) for held in (accelerator._models, accelerator._optimizers)]
        self.is_sharded = is_sharded(accelerator, model)
        self.outlives_runs = accelerator.distributed_type not in PLAIN_JOBS
        self.is_plain = not self.outlives_runs and accelerator.scaler is None
        self.model = model
        self.optimizer = optimizer
        if self.outlives_runs or (training and not self.is_sharded):
            self._prepare(accelerator)
        elif not self.is_sharded:
            self.model = accelerator.prepare_model(model, evaluation_mode=True)
        if self.is_plain:
            self.optimizer = optimizer
        self._name_parts()
        self.has_run = not isinstance(self.model, DistributedDataParallel)
        if not self.has_run:
            self._first_call = self.model.register_forward_pre_hook(self._note_first_call)

    def _prepare(self, accelerator: Accelerator) -> None:
        """Let Accelerate prepare the model, and the optimizer if it exists."""
        model = self.model
        if any(map(is_frozen_and_quantised, model.parameters())):  # quantised weights cannot be broadcast
            quantised = quantised_entries(unwrap(model), unwrap(model).state_dict())
            ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *sorted(quantised)]
            vars(model)["_ddp_params_and_buffers_to_ignore"] = ignored
        if self.optimizer is None or is_created(self.optimizer):
            self.model, self.optimizer = accelerator.prepare(model, self.optimizer)
        elif accelerator.distributed_type in _PREPARED_TOGETHER:
            self._as_passed = model, self.optimizer.make(model)
            self.model, self.optimizer = accelerator.prepare(*self._as_passed)
        elif accelerator.is_fsdp2:  # prepared together only to exchange the parameters
            self.model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
            accelerator._optimizers.pop()
        else:
            self.model = accelerator.prepare(model)

    def make_optimizer(self, accelerator: Accelerator) -> None:
        """Create the optimizer from the parameters of the prepared model, if the user passed a factory."""
        if self.optimizer is None or is_created(self.optimizer):
            return
        optimizer = self.optimizer.make(unwrap(self.model, keep_torch_compile=False))
        self._as_passed = self._as_passed[0], optimizer
        self.optimizer = optimizer if self.is_plain else accelerator.prepare_optimizer(optimizer)
        self._name_parts()

    def _name_parts(self) -> None:
        if type(self.optimizer) is AcceleratedOptimizer and parts_of_optimizer(self.optimizer):
            self.optimizer.__class__ = AcceleratedCombinedOptimizer  # Accelerate's class knows no names

    def _note_first_call(self, *_: object) -> None:
        self.has_run = True
        self._first_call.remove()

    def can_rewrap(self, model: nn.Module) -> bool:
        """Whether the prepared model can be rewrapped: its weights are not sharded and its wrapper is not compiled."""
        return not (self.is_sharded or isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel))

    def release(self, model: nn.Module, optimizer: TrainerOptimizer) -> tuple[nn.Module, TrainerOptimizer]:
        """Return the model and the optimizer as the user passed them, or those with which a callback has replaced them.

        An optimizer that a callback has wrapped is returned without the wrapper, which the next run would wrap again.

        Args:
            model: the trainer's model now
            optimizer: the trainer's optimizer now
        """
        original, passed = self._as_passed
        held = (optimizer, *getattr(optimizer, "__dict__", {}).values())
        optimizer = passed if any(part is self.optimizer or part is passed for part in held) else optimizer
        for module in (original, unwrap(original, keep_torch_compile=False)):
            for mark in ("_is_accelerate_prepared", "_original_forward"):
                vars(module).pop(mark, None)
        vars(original).pop("forward", None)
        if self._forward is not None:
            vars(original)["forward"] = self._forward
        for held, length in self._counts_before:
            del held[length:]
        released = unwrap(model)
        if unwrap(self.model) is released and getattr(released, "_orig_mod", None) is original:
            released = original  # without Accelerate's compilation
        return released, optimizer
