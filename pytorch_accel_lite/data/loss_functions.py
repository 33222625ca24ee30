"""Loss functions: their type, whether one is torch's, and shapes that it would compare wrongly."""

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
