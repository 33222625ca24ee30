"""Modules: their wrappers, modes and precision, and sharded weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.types import StateDict

_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")  # a whole part of a name


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model inside adapters (PEFT); a model without adapters is returned as it is."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def unwrap(model: nn.Module, keep_torch_compile: bool = True) -> nn.Module:
    """Return the model without its ``DistributedDataParallel`` wrapper.

    Unlike Accelerate's function, it modifies no wrapper, so it can be used in the middle of a run.

    Args:
        keep_torch_compile: whether to keep the wrapper of ``torch.compile``
    """
    while True:
        inner = getattr(model, "_orig_mod", None) if "_orig_mod" in getattr(model, "_modules", ()) else None
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner, nn.Module) and (not keep_torch_compile or isinstance(inner, DistributedDataParallel)):
            model = inner
        else:
            return model


def without_compile(state: StateDict) -> StateDict:
    """Remove the prefixes of ``torch.compile`` from the names in a state."""
    return {_COMPILED.sub("", key): value for key, value in state.items()}


_NO_CONTEXT = nullcontext()


def without_gradients() -> AbstractContextManager[None]:
    """Compute no gradients in a block. Cheap if they are already disabled."""
    return torch.no_grad() if torch.is_grad_enabled() else _NO_CONTEXT


@contextmanager
def preserving_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore each module's mode, training or evaluation, after a block."""
    modes = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode for a block."""
    with preserving_modes(model.modules()):
        model.eval()
        yield


def stay_in_eval(module: nn.Module, inputs: object) -> None:
    """Undo the effect of ``model.train()`` before each forward pass. A module-level function, so that models pickle."""
    module.training = False


def keep_in_eval(module: nn.Module) -> None:
    """Keep a module, but not its submodules, in evaluation mode, in spite of ``model.train()``."""
    module.training = False
    if not stays_in_eval(module):
        module.register_forward_pre_hook(stay_in_eval)


def release_from_eval(module: nn.Module) -> None:
    """Let a module follow ``model.train()`` again."""
    hooks = module._forward_pre_hooks  # a copied model has the hook, but no handle to remove it
    for key in [key for key, hook in hooks.items() if hook is stay_in_eval]:
        del hooks[key]


def stays_in_eval(module: nn.Module) -> bool:
    """Whether a module is kept in evaluation mode, in spite of ``model.train()``, as frozen layers are."""
    return stay_in_eval in module._forward_pre_hooks.values()


def mixed_precision(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Run a block under autocast if the accelerator uses mixed precision, like the prepared model's forward pass.

    Casts of weights are not cached from one call to the next: a step may train a critic and then use it.
    """
    return _autocast(accelerator) if accelerator.native_amp else _NO_CONTEXT


@contextmanager
def _autocast(accelerator: Accelerator) -> Iterator[None]:
    with accelerator.autocast():
        torch.set_autocast_cache_enabled(False)
        torch.autocast_decrement_nesting()  # only the outermost autocast clears its cache: make that the model's
        try:
            yield
        finally:
            torch.autocast_increment_nesting()


def are_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of the parameters is sharded over the processes, as a ``DTensor``."""
    # Looking up an attribute that a plain parameter lacks takes ten times as long as checking its type.
    others = [parameter for parameter in parameters if type(parameter) is not nn.Parameter]
    return any(hasattr(parameter, "device_mesh") for parameter in others)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a sharded tensor; any other tensor unchanged."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def reshard(model: nn.Module) -> None:
    """Reshard the parameters: without a backward pass, FSDP2 keeps the parameters gathered last.

    ``model.parameters()`` would then return the gathered parameters, which the optimizer does not know.
    """
    for module in model.modules():
        method = getattr(module, "reshard", None)
        if callable(method):
            method()


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Return the number of processes that share each batch according to the accelerator's ``parallelism_config``."""
    return getattr(getattr(accelerator, "parallelism_config", None), "tp_size", 1) or 1


#: Kinds of jobs in which Accelerate only adds bookkeeping to an optimizer, so the user's optimizer is stepped directly.
PLAIN_JOBS = {kind for kind in DistributedType if kind.name == "NO" or kind.name.startswith("MULTI_")}
#: Kinds of jobs in which Accelerate shards the weights, or what trains them.
SHARDED_JOBS = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}


def is_sharded(accelerator: Accelerator, model: nn.Module) -> bool:
    """Whether the weights of a model are or will be sharded over the processes, by Accelerate or by the user."""
    return accelerator.distributed_type in SHARDED_JOBS or are_sharded(model.parameters())


def normalised_weights(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the weights of embeddings with ``max_norm``: a forward pass normalises the rows that it looks up."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    embeddings = [part for part in parts if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    return [part.weight for part in embeddings if part.max_norm is not None]
