"""Synchronising gradients, and which parameters an update changes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch.optim import Optimizer

from pytorch_accel_lite.optimizers.operations import optimized_parameters
from pytorch_accel_lite.run.state import TrainerLike

NOTHING = nullcontext()


def gradient_sync(accelerator: Accelerator, model: torch.nn.Module, ends_window: bool) -> AbstractContextManager[None]:
    """Return a context in which gradients are averaged over the ranks only at the end of a window."""
    accelerator.sync_gradients = ends_window
    if ends_window or accelerator.num_processes == 1:
        return NOTHING
    return accelerator.no_sync(model)  # type: ignore[no-any-return]


def parameters_not_in_model(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer that are not in the model, such as those of the loss function."""
    in_model = set(model.parameters())
    return [parameter for parameter in optimized_parameters(optimizer) if parameter not in in_model]


def updated_parameters(trainer: TrainerLike) -> list[torch.nn.Parameter]:
    """Return the parameters that an update changes: the optimizer's, and if it optimizes copies, also the model's."""
    optimized = optimized_parameters(trainer.optimizer)
    ids = set(map(id, optimized))
    has_model = any(id(parameter) in ids for parameter in trainer.model.parameters())
    if has_model or trainer.current_run.stepper.updates_one_by_one:  # the optimizer may be for another module
        return optimized
    return [*trainer.model.parameters(), *optimized]
