"""Trying something out with a trainer's model, and leaving everything as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from pytorch_accel_lite.gradients import optimized_parameters
from pytorch_accel_lite.resuming import generator_states, set_generator_states

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


@contextmanager
def unchanged(trainer: Trainer) -> Iterator[None]:
    """Put back weights, buffers, gradients, modes, the optimizer, the scaler and the generators after a block.

    Those of the loss function, too. The weights are kept in host memory, so that the device has room for what is
    tried.
    """
    model, optimizer, scaler = trainer.get_model(), trainer.optimizer, trainer.accelerator.scaler
    roots = [module for module in (model, trainer.loss_func) if isinstance(module, nn.Module)]
    modules = list(chain.from_iterable(root.modules() for root in roots))
    trained = [] if optimizer is None else optimized_parameters(optimizer)
    parameters = list(dict.fromkeys([*chain.from_iterable(root.parameters() for root in roots), *trained]))
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise ValueError("The model has lazy layers without weights yet. Give it a batch first: model(inputs).")
    buffers = chain.from_iterable(root.buffers() for root in roots)
    tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in chain(parameters, buffers)]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    modes = [(module, module.training) for module in modules]
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    scaling, generators = None if scaler is None else scaler.state_dict(), generator_states()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        if state is not None:
            optimizer.load_state_dict(state)
        if scaler is not None:
            scaler.load_state_dict(scaling)
        set_generator_states(generators)
