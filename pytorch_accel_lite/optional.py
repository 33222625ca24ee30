"""What a plain run does not use, imported when it is used: modules with methods of the trainer, several optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.batches import BatchAdapter
from pytorch_accel_lite.optimizers import SchedulerFactory, is_made

if TYPE_CHECKING:
    from torch import nn

    from pytorch_accel_lite import replicas as replicas
    from pytorch_accel_lite.backends import BackendSettings
    from pytorch_accel_lite.checkpoint import saving as saving
    from pytorch_accel_lite.distributed import collectives as collectives
    from pytorch_accel_lite.distributed import rewrapping as rewrapping
    from pytorch_accel_lite.logical import LogicalProcesses
    from pytorch_accel_lite.loops import inference as inference
    from pytorch_accel_lite.loops import own_numbers as own_numbers
    from pytorch_accel_lite.loops import prediction as prediction
    from pytorch_accel_lite.loops import resuming as resuming
    from pytorch_accel_lite.schemes import closures as closures
    from pytorch_accel_lite.schemes import own_step as own_step
    from pytorch_accel_lite.tools import diagnosis as diagnosis
    from pytorch_accel_lite.tools import memory as memory
    from pytorch_accel_lite.tools import tuning as tuning
    from pytorch_accel_lite.trainer import Trainer
else:
    from pytorch_accel_lite.checks.answering import answering_method
    from pytorch_accel_lite.lazy import MethodsOf

    replicas = MethodsOf("pytorch_accel_lite.replicas")
    saving = MethodsOf("pytorch_accel_lite.checkpoint.saving")
    collectives = MethodsOf("pytorch_accel_lite.distributed.collectives")
    rewrapping = MethodsOf("pytorch_accel_lite.distributed.rewrapping")
    inference = MethodsOf("pytorch_accel_lite.loops.inference", answering_method)
    own_numbers = MethodsOf("pytorch_accel_lite.loops.own_numbers")
    prediction = MethodsOf("pytorch_accel_lite.loops.prediction", answering_method)
    resuming = MethodsOf("pytorch_accel_lite.loops.resuming")
    closures = MethodsOf("pytorch_accel_lite.schemes.closures")
    own_step = MethodsOf("pytorch_accel_lite.schemes.own_step")
    diagnosis = MethodsOf("pytorch_accel_lite.tools.diagnosis", answering_method)
    memory = MethodsOf("pytorch_accel_lite.tools.memory", answering_method)
    tuning = MethodsOf("pytorch_accel_lite.tools.tuning", answering_method)


def as_one(optimizer: Any) -> Any:
    """Return several optimizers as one, and a factory as the optimizer that it will create."""
    if optimizer is None or is_made(optimizer):
        return optimizer
    from pytorch_accel_lite.schemes.factories import combine_or_defer

    return combine_or_defer(optimizer)


def create_adapters(model: nn.Module, loss_func: Any, methods: Any) -> dict[str, BatchAdapter]:
    """Return what feeds batches to the model, or to methods of it if there are any, by phase."""
    adapters: dict[str, BatchAdapter] = dict.fromkeys(("train", "eval", "predict"), BatchAdapter(model))
    if methods is None:
        return adapters
    from pytorch_accel_lite.schemes.model_methods import adapters_of

    of_methods: dict[str, Any] = adapters_of(model, loss_func, methods)
    return adapters | of_methods


def compile_step(trainer: Trainer, options: bool | dict[str, Any], adapters: dict[str, BatchAdapter]) -> None:
    """Let a trainer compile its training steps, if asked to."""
    if options is not False:
        from pytorch_accel_lite.schemes.compiled_step import compile_step

        compile_step(trainer, options, adapters)


def create_backend_settings(*settings: bool | None) -> BackendSettings | None:
    """Return the settings of torch that hold for a trainer's runs, if it has any."""
    if settings == (None, None, None):
        return None
    from pytorch_accel_lite.backends import BackendSettings

    return BackendSettings(*settings)


def create_logical_processes(trainer: Trainer, count: int | None) -> LogicalProcesses | None:
    """Return the logical processes of a trainer, if it has a number of them."""
    if count is None:
        return None
    from pytorch_accel_lite.logical import LogicalProcesses

    return LogicalProcesses(trainer, count)


def create_scheduler(trainer: Trainer, create: SchedulerFactory) -> Any:
    """Return the scheduler of a trainer's optimizer, or those of several, with placeholders replaced."""
    from pytorch_accel_lite.checks.schedules import check_scheduler_factory
    from pytorch_accel_lite.placeholders import replace_trainer_placeholder_values

    check_scheduler_factory(create, trainer.optimizer)
    create = replace_trainer_placeholder_values(trainer, create)
    if not isinstance(create, Mapping):
        return create(trainer.optimizer)
    from pytorch_accel_lite.schemes.combined import create_schedulers

    return create_schedulers(create, trainer.optimizer)
