"""What fills the memory of a device when it has run out, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain

import torch

from pytorch_accel_lite.extending import MEMORY_ADVICE, Run, TrainerLike
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Phase
from pytorch_accel_lite.extension_tools.modules_and_devices import capacity_of, local_shard, module_of
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    all_optimized_parameters,
    is_created,
    other_modules,
    other_optimizers,
)
from pytorch_accel_lite.utils import format_bytes


def describe_memory(trainer: TrainerLike) -> Iterator[str]:
    """Yield lines on what fills the memory, its peak and capacity, and where torch's snapshot of it was written."""
    device = trainer.device
    memory, capacity = module_of(device), capacity_of(device)
    held = held_bytes(trainer)
    parts = [f"{name} {format_bytes(size)}" for name, size in held.items()]
    if memory is None or not hasattr(memory, "max_memory_allocated"):
        yield f"  memory: {', '.join(parts)}, beside activations"
        return
    peak = memory.max_memory_allocated(device)
    parts.append(f"the rest (activations, temporary results) {format_bytes(max(peak - sum(held.values()), 0))}")
    of_capacity = "" if capacity is None else f" of {format_bytes(capacity)}"
    yield f"  memory: {', '.join(parts)}; peak {format_bytes(peak)}{of_capacity}"
    write = getattr(getattr(memory, "memory", None), "_dump_snapshot", None)
    if write is not None:
        path = f"out_of_memory_rank{trainer.ranks.rank}.pickle"
        write(path)
        yield f"  memory snapshot: {path} in the working directory; open it at https://docs.pytorch.org/memory_viz"


def held_bytes(trainer: TrainerLike) -> dict[str, int]:
    """Return the bytes that this process holds on the device, by kind.

    This includes all modules, optimizers and gradients of the trainer and its attributes. Of sharded tensors, only this
    process's shards count.
    """
    modules = [trainer.get_model(), *other_modules(trainer).values()]
    parameters = [*chain.from_iterable(module.parameters() for module in modules)]
    parameters += all_optimized_parameters(trainer)
    buffers = chain.from_iterable(module.buffers() for module in modules)
    optimizers = list(other_optimizers(trainer).values())
    if trainer.optimizer is not None and is_created(trainer.optimizer):
        optimizers.append(trainer.optimizer)
    states = chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
    values = chain.from_iterable(state.values() for state in states if isinstance(state, dict))
    kinds: dict[str, Iterable[object]] = {
        "weights": [*parameters, *buffers],
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer state": list(values),
    }
    return {kind: _total_bytes(tensors, trainer.device) for kind, tensors in kinds.items()}


def _total_bytes(values: Iterable[object], device: torch.device) -> int:
    tensors = [local_shard(value) for value in values if isinstance(value, torch.Tensor)]
    distinct = {id(tensor): tensor for tensor in tensors if tensor.device.type == device.type}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def advise_on_memory(trainer: TrainerLike, run: Run, phase: Phase) -> str:
    """Return advice on what to do if memory has run out in a phase of a run."""
    others = list[str]()
    if phase == "training":
        for advice in MEMORY_ADVICE:
            with suppress(Exception):  # an error here must not hide the usual advice
                others.append(advice(trainer))
    return " Or ".join([_usual_advice(run, phase), *filter(None, others)])


def _usual_advice(run: Run, phase: Phase) -> str:
    if phase == "prediction":
        return "lower per_device_batch_size of predict()."
    if run.request.auto_microbatch:
        return (
            "not even a single sample fits, or the update does not. Shorten or scale down the samples, or let the "
            "model take less: lower precision, activation checkpointing, sharded weights. estimate_memory() shows what "
            "fits."
        )
    if phase == "evaluation":
        return (
            "pass auto_microbatch=True to train() or evaluate(), which splits evaluation batches that do not fit, or "
            "a lower per_device_batch_size, for evaluations in train() as eval_dataloader_kwargs={'batch_size': ...}."
        )
    return (
        "lower per_device_batch_size, and raise gradient_accumulation_steps to keep the same updates; or pass "
        "auto_microbatch=True to train(), which splits batches that do not fit."
    )
