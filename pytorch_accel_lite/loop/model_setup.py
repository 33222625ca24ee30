"""Preparing the model and the optimizer with Accelerate for a run, and releasing them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.missing_extensions import missing_extension_text
from pytorch_accel_lite.base.quantised_weights import keep_as_they_are, trained_and_quantised
from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.checkpoint.models.model_forms import is_of_peft
from pytorch_accel_lite.data.batch_adapter import BatchAdapter
from pytorch_accel_lite.run.prepared_model import PreparedModel
from pytorch_accel_lite.run.run import CompiledForwardLike, TrainerLike

#: Functions with which extensions change a model in place, by trainer argument. Each function is called with the
#: trainer and the value, and returns a text to print.
MODEL_CHANGES: dict[str, Callable[[TrainerLike, Any], str]] = {}


class StepCompiler(Protocol):
    """Makes a compiled form of a trainer's ``calculate_train_batch_loss``.

    It gets the arguments for ``torch.compile``, and the adapter that feeds batches to the trainer's model.
    """

    def __call__(self, trainer: TrainerLike, options: dict[str, Any], adapter: BatchAdapter) -> CompiledForwardLike:
        """Return the compiled form."""


#: The compiler of steps.
STEP_COMPILER: Slot[StepCompiler] = Slot("compiled_step")


def prepare_model(trainer: TrainerLike, training: bool) -> None:
    """Prepare the model and the optimizer with Accelerate, unless they are prepared already."""
    prepared = trainer.prepared_model
    is_same = prepared is not None and (trainer.model, trainer.optimizer) == (prepared.model, prepared.optimizer)
    if prepared is not None and (is_same or not prepared.outlives_runs):
        return
    if isinstance(trainer.loss_func, nn.Module):
        trainer.loss_func.to(trainer.current_run.device)
    apply_model_options(trainer)
    step_averages = "train_step" in trainer.current_run.overridden or trainer.division.has_fixed_shares
    prepared = PreparedModel(trainer.accelerator, trainer.model, trainer.optimizer, training and not step_averages)
    trainer.prepared_model = prepared
    trainer.model = prepared.model
    if training or prepared.outlives_runs:
        prepared.make_optimizer(trainer.accelerator)
    trainer.optimizer = prepared.optimizer


def check_model_has_values(trainer: TrainerLike) -> None:
    """Check that no parameter is on the meta device, unless Accelerate gives it values: FSDP2, or hooks of offloading.

    Raises:
        ValueError: if one is
    """
    model = trainer.get_model(keep_torch_compile=False)
    if trainer.accelerator.is_fsdp2 or not any(parameter.is_meta for parameter in model.parameters()):
        return
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has parameters on the meta device, which have no values. Shard it in an "
            "overridden parallelize_model(mesh) of the trainer, which then gives them values; or call "
            "model.to_empty(device=...) and initialise them before you create the trainer."
        )


def apply_model_options(trainer: TrainerLike) -> None:
    """Change the memory format of the model and compile it, in place, as requested, unless it is already compiled."""
    _prepare_quantised(trainer.get_model())
    if not trainer.channels_last and trainer.compile_model is False:
        return
    model = trainer.get_model()
    if trainer.channels_last:
        model.to(memory_format=torch.channels_last)
    options = trainer.compile_model
    if options is not False and not compiles_by_block(options) and model._compiled_call_impl is None:
        model.compile(**(options if isinstance(options, dict) else {}))


def _prepare_quantised(model: nn.Module) -> None:
    """Leave quantised weights where they are, and check that none would be trained, as in a head that PEFT copied."""
    keep_as_they_are(model)
    trained = trained_and_quantised(model)
    if trained and is_of_peft(model):
        raise ValueError(
            f"{listed(trained, 4)} would be trained, but are quantised. Quantise the model without these modules: "
            "TorchAoConfig(..., modules_to_not_convert=[...]), or BitsAndBytesConfig(llm_int8_skip_modules=[...])."
        )


def apply_block_options(trainer: TrainerLike) -> None:
    """Change the blocks of a model in place, as ``activation_checkpointing`` and ``compile_model`` request."""
    wanted: dict[str, object] = {}
    if trainer.activation_checkpointing is not False:
        wanted["activation_checkpointing"] = trainer.activation_checkpointing
    if compiles_by_block(trainer.compile_model):
        wanted["compile_model"] = trainer.compile_model
    for argument, value in wanted.items():
        if argument not in MODEL_CHANGES:
            raise ValueError(f"{argument}={value!r} {missing_extension_text('blocks')}")
        trainer.print(MODEL_CHANGES[argument](trainer, value))


def compiles_by_block(compile_model: object) -> bool:
    """Whether a trainer's ``compile_model`` asks for blocks compiled one by one."""
    return compile_model == "blocks" or (isinstance(compile_model, dict) and "blocks" in compile_model)


def create_compiled_forward(
    trainer: TrainerLike, compile_step: bool | dict[str, Any], adapter: BatchAdapter
) -> CompiledForwardLike | None:
    """Return the compiled form of a trainer's ``calculate_train_batch_loss``, or ``None`` if it is not requested.

    Raises:
        ValueError: if the extension is missing
    """
    if compile_step is False:
        return None
    compiler = STEP_COMPILER.get(f"compile_step={compile_step!r}")
    return compiler(trainer, {} if compile_step is True else dict(compile_step), adapter)


def release_model(trainer: TrainerLike) -> None:
    """Release the model and the optimizer, unless their weights exist only in prepared form."""
    prepared = trainer.prepared_model
    if prepared is not None and not prepared.outlives_runs:
        trainer.model, trainer.optimizer = prepared.release(trainer.model, trainer.optimizer)
        trainer.prepared_model = None


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
