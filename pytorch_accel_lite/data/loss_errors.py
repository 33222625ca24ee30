"""Checks of the loss that a step returns, and of the shapes that a loss function compares, perhaps wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from pytorch_accel_lite.base.types import Tree

#: Computes the loss, or several losses by name, from the outputs of a model and the targets.
LossFunction: TypeAlias = Callable[..., torch.Tensor | Mapping[str, torch.Tensor]]

_ELEMENTWISE = {
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.KLDivLoss),
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.poisson_nll_loss, functional.kl_div),
}
_CROSS_ENTROPY = {nn.CrossEntropyLoss, functional.cross_entropy}


_EXAMPLE = "For example: return {'loss': loss, 'model_outputs': outputs}."


class LossShapeError(ValueError):
    """Raised for shapes of outputs and targets that a loss accepts, but does not compare sample by sample."""


def is_of_torch(loss: object) -> bool:
    """Whether a loss function or module is torch's own, and therefore takes tensors."""
    loss = loss.func if isinstance(loss, partial) else loss
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    return str(getattr(kind, "__module__", "")).startswith("torch.nn")


def shapes_are_known(loss: LossFunction | None, outputs: Tree, targets: Tree) -> bool:
    """Check shapes; return whether the check is conclusive, which it is not for a batch with a single element.

    Args:
        loss: a loss function, or a loss module

    Raises:
        LossShapeError: if the loss accepts these shapes, but does not compute the loss of each sample
    """
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return True
    kind = type(loss) if isinstance(loss, nn.Module) else loss.func if isinstance(loss, partial) else loss
    if kind in _ELEMENTWISE:
        _check_broadcasting(tuple(outputs.shape), tuple(targets.shape))
        return outputs.numel() > 1
    if kind in _CROSS_ENTROPY and outputs.ndim > 1 and outputs.shape[1] == 1:
        raise LossShapeError(
            f"loss_func: cross entropy over the single class of outputs of shape {tuple(outputs.shape)} is always 0. "
            "For binary classification with one output use BCEWithLogitsLoss, with targets of the same shape, or give "
            "the model an output for each class."
        )
    return True


def _check_broadcasting(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    try:
        broadcast = tuple(torch.broadcast_shapes(outputs, targets))  # type: ignore[no-untyped-call]
    except RuntimeError:  # the loss function itself rejects these shapes
        return
    if broadcast not in (outputs, targets):
        raise LossShapeError(
            f"loss_func: outputs of shape {outputs} and targets of shape {targets} would be broadcast to {broadcast}, "
            "comparing each output with the targets of other samples. Make the shapes equal, for example with "
            "targets.unsqueeze(1) in the dataset or outputs.squeeze(1) in the model."
        )


def check_loss(output: object, method: str, training: bool) -> None:
    """Check that a step returned a loss with one element, or several by name, and in training with gradients.

    In evaluation, a loss may have an element for each sample, or be ``None``.
    """
    if not isinstance(output, Mapping):
        raise TypeError(f"{method} must return a dict with 'loss', not {type(output).__name__}. {_EXAMPLE}")
    if "loss" not in output:
        hint = "" if training else " Return 'loss': None to evaluate without a loss."
        raise ValueError(f"{method} must return a dict with 'loss'; it has the keys {sorted(map(str, output))}.{hint}")
    losses = output["loss"]
    if losses is None and not training:
        return
    named = losses if isinstance(losses, Mapping) else {"loss": losses}
    if not named:
        raise ValueError(f"{method} returned an empty dict of losses.")
    if "loss" in named and len(named) > 1:
        raise ValueError(f"{method} returned a dict of losses with one called 'loss', like their sum. Rename it.")
    for name, loss in named.items():
        if not isinstance(loss, torch.Tensor):
            hint = " Return the loss itself, not loss.item()." if isinstance(loss, float) else ""
            raise TypeError(f"{method}: {name!r} must be a tensor, not {type(loss).__name__} ({loss!r}).{hint}")
        if loss.numel() != 1 and (training or not loss.numel()):
            raise ValueError(
                f"{method}: {name!r} must have one element, but has shape {tuple(loss.shape)}. Reduce it with .mean()."
            )
    if training and not any(loss.requires_grad for loss in named.values()):
        reason = (
            ". Is the model frozen, or was the loss detached, or computed under torch.no_grad()?"
            if torch.is_grad_enabled()
            else ", because they are disabled: train() was called under torch.no_grad(), or something has called "
            "torch.set_grad_enabled(False)."
        )
        raise ValueError(f"{method}: the loss does not require gradients{reason}")
