"""Preparing the model and the optimizer with Accelerate for a run, and releasing them afterwards."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pytorch_accel_lite.base.quantised import is_quantised, keep_as_they_are
from pytorch_accel_lite.base.reprs import short_repr
from pytorch_accel_lite.base.text import listed
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.checkpoint.model_forms import is_of_peft
from pytorch_accel_lite.checkpoint.weights import load_optimizer_state
from pytorch_accel_lite.extension_names import missing_extension_text
from pytorch_accel_lite.optimizers.combined import combine
from pytorch_accel_lite.optimizers.operations import OptimizerFactory, Optimizers, TrainerOptimizer, is_created
from pytorch_accel_lite.run.prepared_model import PreparedModel
from pytorch_accel_lite.run.state import TrainerLike

#: Functions with which extensions change a model in place, by trainer argument. Each function is called with the
#: trainer and the value, and returns a text to print.
MODEL_CHANGES: dict[str, Callable[[TrainerLike, Any], str]] = {}


def prepare_model(trainer: TrainerLike, training: bool) -> None:
    """Prepare the model and the optimizer with Accelerate, unless they are prepared already."""
    prepared = trainer.prepared_model
    is_same = prepared is not None and (trainer.model, trainer.optimizer) == (prepared.model, prepared.optimizer)
    if prepared is not None and (is_same or not prepared.outlives_runs):
        return
    if isinstance(trainer.loss_func, nn.Module):
        trainer.loss_func.to(trainer.device)
    apply_model_options(trainer)
    step_averages = "train_step" in trainer.current_run.overridden or trainer.division.averages_gradients
    prepared = PreparedModel(trainer.accelerator, trainer.model, trainer.optimizer, training and not step_averages)
    trainer.prepared_model = prepared
    trainer.model = prepared.model
    if training or prepared.outlives_runs:
        prepared.make_optimizer(trainer.accelerator)
    trainer.optimizer = prepared.optimizer


def apply_model_options(trainer: TrainerLike) -> None:
    """Change the memory format of the model and compile it, in place, as requested, unless it is already compiled."""
    _prepare_quantised(trainer.get_model())
    if not trainer.channels_last and trainer.compile_model is False:
        return
    model = trainer.get_model()
    if trainer.channels_last:
        model.to(memory_format=torch.channels_last)
    options = trainer.compile_model
    if options is not False and not is_by_blocks(options) and model._compiled_call_impl is None:
        model.compile(**(options if isinstance(options, dict) else {}))


def _prepare_quantised(model: nn.Module) -> None:
    """Leave quantised weights where they are, and check that none would be trained, as in a head that PEFT copied."""
    keep_as_they_are(model)
    trained = [name for name, value in model.named_parameters() if value.requires_grad and is_quantised(value)]
    if trained and is_of_peft(model):
        raise ValueError(
            f"{listed(trained, 4)} would be trained, but are quantised. Quantise the model without these modules: "
            "TorchAoConfig(..., modules_to_not_convert=[...]), or BitsAndBytesConfig(llm_int8_skip_modules=[...])."
        )


def change_blocks(trainer: TrainerLike) -> None:
    """Change the blocks of a model in place, as ``activation_checkpointing`` and ``compile_model`` request."""
    wanted: dict[str, object] = {}
    if trainer.activation_checkpointing is not False:
        wanted["activation_checkpointing"] = trainer.activation_checkpointing
    if is_by_blocks(trainer.compile_model):
        wanted["compile_model"] = trainer.compile_model
    for argument, value in wanted.items():
        if argument not in MODEL_CHANGES:
            raise ValueError(f"{argument}={value!r} {missing_extension_text('blocks')}")
        trainer.print(MODEL_CHANGES[argument](trainer, value))


def is_by_blocks(compile_model: object) -> bool:
    """Whether a trainer's ``compile_model`` asks for blocks compiled one by one."""
    return compile_model == "blocks" or (isinstance(compile_model, dict) and "blocks" in compile_model)


def release_model(trainer: TrainerLike) -> None:
    """Release the model and the optimizer, unless their weights exist only in prepared form."""
    prepared = trainer.prepared_model
    if prepared is not None and not prepared.outlives_runs:
        trainer.model, trainer.optimizer = prepared.release(trainer.model)
        trainer.prepared_model = None


class UnmadeOptimizer:
    """Stands for an optimizer that a factory will create when a run first prepares the model for training.

    It has no parameter groups. A state loaded into it is kept for the real optimizer.

    Args:
        factory: called with a list of the trainable parameters; or with the model, or a list of names and parameters,
            if its first argument is called ``model`` or ``named_parameters``

    Attributes:
        name: the factory as error messages show it
    """

    def __init__(self, factory: OptimizerFactory) -> None:
        self.factory = factory
        self.name = short_repr(factory)
        self._state: StateDict | None = None

    def make(self, model: nn.Module) -> Optimizer:
        """Create the optimizer for a model that is otherwise ready to be trained.

        Raises:
            ValueError: if no parameter of the model is trainable
            TypeError: if the factory does not return an optimizer, or several in a dict or a list
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

    def state_dict(self) -> StateDict | None:
        """Return the state that was loaded; ``None`` if there is none."""
        return self._state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Keep a state for the real optimizer."""
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


def combine_or_defer(optimizer: Optimizers | OptimizerFactory | None) -> TrainerOptimizer:
    """Combine several optimizers into one, and wrap a factory as an ``UnmadeOptimizer``."""
    if callable(optimizer) and not is_created(optimizer):
        return UnmadeOptimizer(optimizer)
    return combine(optimizer)


def _first_argument(factory: Callable[..., object]) -> str:
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except ValueError:
        return ""


def rewrap_model(trainer: TrainerLike) -> None:
    """Wrap the model again, because its set of trained parameters has changed: ``Trainer.rewrap_model()``."""
    if not trainer.can_rewrap_model:
        raise RuntimeError(
            "The set of trained parameters cannot change in the middle of this run: the model is sharded "
            f"({trainer.accelerator.distributed_type.value}) or was compiled by Accelerate together with its wrapper. "
            "Freeze before the run, or compile the model yourself with torch.compile."
        )
    old = trainer.model
    prepared = trainer.prepared_model
    if prepared is None or not isinstance(old, DistributedDataParallel):
        return
    for name in ("reducer", "logger"):  # removes the old wrapper's hooks from the parameters
        delattr(old, name)
    handler = trainer.accelerator.ddp_handler
    kwargs = {} if handler is None else handler.to_kwargs()
    new = DistributedDataParallel(old.module, device_ids=old.device_ids, output_device=old.output_device, **kwargs)
    if handler is not None:
        handler.register_comm_hook(new)
    vars(new)["_is_accelerate_prepared"] = True
    models = trainer.accelerator._models
    models[:] = [new if held is old else held for held in models]
    if prepared.model is old:
        prepared.model = new
    trainer.model = new
