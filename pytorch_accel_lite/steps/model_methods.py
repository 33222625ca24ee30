"""Methods of the user's model that compute losses and predictions, in place of its ``forward`` and a loss function."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.operations import convert_to_fp32
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.batches import BatchAdapter, BatchOutput, find_batch_size
from pytorch_accel_lite.base.text import did_you_mean

if TYPE_CHECKING:
    from pytorch_accel_lite.data import Batch

_PHASES = ("train", "eval", "predict")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def create_adapters(model: nn.Module, loss_func: Any, methods: Any) -> dict[str, BatchAdapter]:
    """Return what feeds batches to the model, or to methods of it if there are any, by phase."""
    adapters: dict[str, BatchAdapter] = dict.fromkeys(_PHASES, BatchAdapter(model))
    of_methods: dict[str, Any] = {} if methods is None else _adapters_of(model, loss_func, methods)
    return adapters | of_methods


def _adapters_of(model: nn.Module, loss_func: Any, methods: Any) -> dict[str, MethodAdapter]:
    """Return what feeds batches to the methods that a trainer was given, by ``"train"``, ``"eval"`` or ``"predict"``.

    Without a method for evaluation, the one for training computes the losses of evaluations, too.

    :raises TypeError, ValueError: if the model has no such method, or a loss function would not be called
    """
    example = "such as {'train': 'train_step', 'eval': 'evaluate_step'}"
    if not isinstance(methods, Mapping) or not all(isinstance(name, str) for name in methods.values()):
        raise TypeError(f"model_methods={methods!r} must be a dict with names of methods, {example}.")
    unknown = [phase for phase in methods if phase not in _PHASES]
    if unknown or not methods:
        raise ValueError(f"model_methods={methods!r} must have keys out of {', '.join(map(repr, _PHASES))}, {example}.")
    if loss_func is not None and "train" in methods:
        raise ValueError(
            f"model_methods={methods!r}: {methods['train']} returns the loss, so loss_func would never be called. Pass "
            "loss_func=None."
        )
    adapters = {phase: MethodAdapter(model, name, phase) for phase, name in methods.items()}
    if "train" in adapters:
        adapters.setdefault("eval", MethodAdapter(model, methods["train"], "train"))
    return adapters


class MethodAdapter:
    """Feeds batches to a method of a model, matching them to its parameters.

    The keys of a dict are passed by name, the elements of a tuple or list by position, and anything else as the only
    argument. A method whose only parameter is called ``batch`` gets the batch as it is.

    :param phase: ``"train"``, ``"eval"`` or ``"predict"``
    """

    def __init__(self, model: nn.Module, name: str, phase: str) -> None:
        method = getattr(model, name, None)
        where = f"model_methods[{phase!r}]={name!r}"
        if not callable(method) or isinstance(method, nn.Module):
            methods = [other for other, _ in inspect.getmembers(type(model), callable) if not hasattr(nn.Module, other)]
            raise ValueError(f"{where}: {type(model).__name__} has no such method.{did_you_mean(name, methods)}")
        _refuse_wrapper(model, name)
        self._name = name
        self._signature = inspect.signature(method)
        parameters = self._signature.parameters.values()
        self._takes_whole = [parameter.name for parameter in parameters] == ["batch"]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._known = [p.name for p in parameters if p.kind in _NAMED]
        self._required = [p.name for p in parameters if p.kind in _NAMED and p.default is p.empty]
        self._title = f"{type(model).__name__}.{name}{self._signature}"
        self._is_new = True

    def outputs_and_loss(self, model: nn.Module, loss_func: Any, batch: Any, read: Batch | None) -> BatchOutput:
        """Return what the method returns for a batch, a dict with ``loss``.

        :param read: the batch as it was read; a step may have passed other data
        """
        returned = self._call(model, *self._match(batch))
        if not isinstance(returned, Mapping) or "loss" not in returned:
            kind = f"the keys {list(returned)}" if isinstance(returned, Mapping) else type(returned).__name__
            raise TypeError(
                f"{self._title} must return a dict with 'loss', not {kind}. In evaluations, 'loss': None is allowed."
            )
        size = read.num_samples if read is not None and batch is read.data else None
        return {"batch_size": find_batch_size(batch, size or None), **returned}

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return what the method returns for a batch without what it does not take, such as targets."""
        if isinstance(batch, Mapping) and not (self._takes_whole or self._takes_all):
            batch = {key: value for key, value in batch.items() if key in self._known}
        elif isinstance(batch, (tuple, list)) and not self._takes_whole:
            batch = batch[: max(len(self._required), 1)]
        return self._call(model, *self._match(batch))

    def _match(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the method for a batch."""
        if self._takes_whole or not isinstance(batch, (Mapping, tuple, list)):
            return (batch,), {}
        return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})

    def _call(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the method such that the wrappers of the model take part as they do in its forward pass."""
        if isinstance(model, DistributedDataParallel):
            with _calling(model, self._name):
                returned = model(*arguments, **named)
        else:
            if self._is_new:
                _refuse_wrapper(model, self._name)
                _tell_fsdp(model, self._name)
                self._is_new = False
            returned = getattr(model, self._name)(*arguments, **named)
        amp = next((p.device.type for p in model.parameters()), "cpu")
        return convert_to_fp32(returned) if torch.is_autocast_enabled(amp) else returned


class _Method(nn.Module):
    """A module whose forward pass is a method of another, none of whose weights it has."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.forward = method


@contextmanager
def _calling(wrapper: DistributedDataParallel, name: str) -> Iterator[None]:
    """Let ``DistributedDataParallel``, which averages gradients only after its forward pass, call a method in it."""
    model = wrapper.module
    wrapper.module = _Method(getattr(model, name))
    try:
        yield
    finally:
        wrapper.module = model


def _tell_fsdp(model: nn.Module, name: str) -> None:
    """Let a model sharded with ``fully_shard`` gather its weights for the method as for its forward pass."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FSDPModule) and name not in vars(model):
        fsdp.register_fsdp_forward_method(model, name)


def _refuse_wrapper(model: nn.Module, name: str) -> None:
    """Raise an error for a wrapper that only passes on the names of what it wraps, which would then be left out."""
    if name not in vars(model) and not hasattr(type(model), name):
        raise TypeError(
            f"model_methods: {name} would be called without the wrapper of the model, {type(model).__name__}. Pass the "
            "model itself; to compile its forward pass, use compile_model=True."
        )
