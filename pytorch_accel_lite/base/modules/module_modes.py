"""The modes in which modules compute: training or evaluation, and without gradients.

A run sets training and evaluation in ``train_epoch_start()`` and ``eval_epoch_start()`` of the trainer. After an
evaluation within an epoch, ``loop/evaluation.py`` restores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

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
