"""Preparing the model and the optimizer with Accelerate for a run, and releasing them afterwards."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.modules import PLAIN, is_sharded, unwrap
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.reprs import short
from pytorch_accel_lite.checkpoint.weights import load_optimizer_state
from pytorch_accel_lite.optimizers.combined import AcceleratedCombinedOptimizer, combine
from pytorch_accel_lite.optimizers.operations import OptimizerFactory, is_created, parts_of

_PREPARED_TOGETHER = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}  # what has an optimizer of its own


class PreparedModel:
    """A model and an optimizer prepared for training: placed on the device, wrapped, in mixed precision.

    A model that the user has sharded with ``fully_shard`` is left unchanged.

    :param training: whether to prepare for training; otherwise only place the model and apply mixed precision
    :ivar optimizer: the optimizer to step: the user's own if Accelerate adds nothing to it, otherwise the prepared one
    :ivar is_plain: whether Accelerate adds nothing to the backward pass and the optimizer
    :ivar is_sharded: whether the weights are sharded over the processes, so that no process can compute alone
    :ivar outlives_runs: whether it is kept at the end of a run, because its weights exist in no other form
    :ivar trains: whether optimizers that have modes are in training mode
    :ivar has_run: whether the prepared model has been called, and not just the bare one inside it
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any, training: bool) -> None:
        self._originals = model, optimizer
        self.trains = False
        self._forward = vars(model).get("forward")
        # Accelerate's lists of prepared objects. free_memory() would also drop what others have prepared, and collect
        # garbage, which takes longer than many a run.
        self._held = [(held, len(held)) for held in (accelerator._models, accelerator._optimizers)]
        self.is_sharded = is_sharded(accelerator, model)
        self.outlives_runs = accelerator.distributed_type not in PLAIN
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
        """Give the model to Accelerate, and the optimizer if it is made."""
        model = self.model
        if self.optimizer is None or is_created(self.optimizer):
            self.model, self.optimizer = accelerator.prepare(model, self.optimizer)
        elif accelerator.distributed_type in _PREPARED_TOGETHER:
            self._originals = model, self.optimizer.make(model)
            self.model, self.optimizer = accelerator.prepare(*self._originals)
        elif accelerator.is_fsdp2:  # which Accelerate prepares together, too, but only to exchange the parameters
            self.model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
            accelerator._optimizers.pop()
        else:
            self.model = accelerator.prepare(model)

    def make_optimizer(self, accelerator: Accelerator) -> None:
        """Make the optimizer from the parameters of the prepared model, where a factory was given for it."""
        if self.optimizer is None or is_created(self.optimizer):
            return
        optimizer = self.optimizer.make(unwrap(self.model, keep_torch_compile=False))
        self._originals = self._originals[0], optimizer
        self.optimizer = optimizer if self.is_plain else accelerator.prepare_optimizer(optimizer)
        self._name_parts()

    def _name_parts(self) -> None:
        if type(self.optimizer) is AcceleratedOptimizer and parts_of(self.optimizer):
            self.optimizer.__class__ = AcceleratedCombinedOptimizer  # Accelerate's own knows no names

    def _note_first_call(self, *_: Any) -> None:
        self.has_run = True
        self._first_call.remove()

    def can_rewrap(self, model: nn.Module) -> bool:
        """Whether the prepared model can be rewrapped: not if its weights are sharded or its wrapper is compiled."""
        return not (self.is_sharded or isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel))

    def release(self, model: nn.Module) -> tuple[nn.Module, Any]:
        """Return the model, which a callback may have replaced, and the optimizer as the user passed them."""
        original, optimizer = self._originals
        for module in (original, unwrap(original, keep_torch_compile=False)):
            for mark in ("_is_accelerate_prepared", "_original_forward"):
                vars(module).pop(mark, None)
        vars(original).pop("forward", None)
        if self._forward is not None:
            vars(original)["forward"] = self._forward
        for held, length in self._held:
            del held[length:]
        released = unwrap(model)
        if unwrap(self.model) is released and getattr(released, "_orig_mod", None) is original:
            released = original  # compiled by Accelerate
        return released, optimizer


def prepare_model(trainer: TrainerLike, training: bool) -> None:
    """Prepare the model and the optimizer with Accelerate, unless they are prepared already."""
    prepared = trainer.prepared_model
    is_same = prepared is not None and (trainer.model, trainer.optimizer) == (prepared.model, prepared.optimizer)
    if prepared is not None and (is_same or not prepared.outlives_runs):
        return
    if isinstance(trainer.loss_func, nn.Module):
        trainer.loss_func.to(trainer.device)
    apply_model_options(trainer)
    averages = is_overridden(trainer, "train_step") or trainer.logical is not None  # the step does so by itself
    prepared = PreparedModel(trainer.accelerator, trainer.model, trainer.optimizer, training and not averages)
    trainer.prepared_model = prepared
    trainer.model = prepared.model
    if training or prepared.outlives_runs:
        prepared.make_optimizer(trainer.accelerator)
    trainer.optimizer = prepared.optimizer


def apply_model_options(trainer: TrainerLike) -> None:
    """Change the memory format of the model and compile it, in place and as requested, unless it is compiled."""
    model = trainer.get_model()
    if trainer.channels_last:
        model.to(memory_format=torch.channels_last)
    if trainer.compile_model is not False and model._compiled_call_impl is None:
        model.compile(**({} if trainer.compile_model is True else trainer.compile_model))


def release_model(trainer: TrainerLike) -> None:
    """Release the model and the optimizer, unless their weights exist only in prepared form."""
    prepared = trainer.prepared_model
    if prepared is not None and not prepared.outlives_runs:
        trainer.model, trainer.optimizer = prepared.release(trainer.model)
        trainer.prepared_model = None


class UnmadeOptimizer:
    """The optimizer of a trainer that was given a factory, until a run first prepares the model for training.

    It has no parameter groups. A state that is loaded into it is kept for the optimizer that will be made.

    :param factory: called with a list of the trainable parameters; with the model, or with a list of the names and
        parameters, where its first argument is called ``model`` or ``named_parameters``
    """

    def __init__(self, factory: OptimizerFactory) -> None:
        self.factory = factory
        self.name = short(factory)
        self._state: dict[str, Any] | None = None

    def make(self, model: nn.Module) -> Any:
        """Return the optimizer for a model that is otherwise ready to be trained.

        :raises ValueError: when no parameter of the model is to be trained
        :raises TypeError: when the factory returns anything but an optimizer, or several in a dict or a list
        """
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not trainable:
            raise ValueError(
                f"optimizer={self.name}: no parameter of {type(model).__name__} requires a gradient, so there is "
                "nothing to optimize. Was everything frozen?"
            )
        by_argument = {"model": model, "named_parameters": list(trainable.items())}
        optimizer = combine(self.factory(by_argument.get(_first_argument(self.factory), list(trainable.values()))))
        if not is_created(optimizer):
            raise TypeError(
                f"optimizer={self.name} returned {optimizer!r}. It must return a torch.optim.Optimizer, or a dict or "
                "a list of them."
            )
        if self._state is not None:
            try:
                load_optimizer_state(optimizer, self._state)
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f"The state that was loaded does not fit what optimizer={self.name} returned: {error}"
                ) from error
        return optimizer

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that was loaded, if one was."""
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state for the optimizer that will be made."""
        self._state = copy.deepcopy(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.optimizer has no {name!r} yet: optimizer={vars(self).get('name')} is called when train(), or a "
            "tool such as find_lr(), first prepares the model; from then on trainer.optimizer is what it returned."
        )

    def __repr__(self) -> str:
        return f"{self.name} (not called yet)"


def combine_or_defer(optimizer: Any) -> Any:
    """Return optimizers as one, and a factory as the optimizer that it has yet to make."""
    is_factory = callable(optimizer) and not is_created(optimizer)
    return UnmadeOptimizer(optimizer) if is_factory else combine(optimizer)


def _first_argument(factory: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except ValueError:
        return ""


def rewrap_model(self: TrainerLike) -> None:
    """Wrap the model again, as its set of trained parameters has changed: :meth:`Trainer.rewrap_model`."""
    if not self.can_rewrap_model:
        raise RuntimeError(
            "The set of trained parameters cannot change in the middle of this run: the model is sharded "
            f"({self.accelerator.distributed_type.value}) or was compiled by Accelerate together with its wrapper. "
            "Freeze before the run, or compile the model yourself with torch.compile."
        )
    old = self.model
    prepared = self.prepared_model
    if prepared is None or not isinstance(old, DistributedDataParallel):
        return
    for name in ("reducer", "logger"):  # removes the old wrapper's hooks from the parameters
        delattr(old, name)
    handler = self.accelerator.ddp_handler
    kwargs = {} if handler is None else handler.to_kwargs()
    new = DistributedDataParallel(old.module, device_ids=old.device_ids, output_device=old.output_device, **kwargs)
    if handler is not None:
        handler.register_comm_hook(new)
    vars(new)["_is_accelerate_prepared"] = True
    models = self.accelerator._models
    models[:] = [new if held is old else held for held in models]
    if prepared.model is old:
        prepared.model = new
    self.model = new
