"""What steps return: checked and completed."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from functools import reduce
from typing import TypeAlias

import torch

from pytorch_accel_lite.base.machine import accumulation_dtype
from pytorch_accel_lite.data.batches import infer_batch_size, size_of_filler
from pytorch_accel_lite.data.sources import BatchData, BatchOutput

#: A loss, or several by name.
Losses: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor]


def complete_output(
    output: BatchOutput, data: BatchData, num_samples: int | None, method: str, training: bool
) -> BatchOutput:
    """Check the output of a step, and return it with the entries that were missing.

    A dict is copied: the step may return the same one each time.

    Args:
        data: the batch
        num_samples: number of samples collated into the batch, or ``None`` if unknown
        method: name of the method that returned the output, for errors
    """
    losses = output.get("loss") if type(output) is dict else None
    if not (isinstance(losses, torch.Tensor) and losses.ndim == 0 and (losses.requires_grad or not training)):
        check_loss(output, method, training)  # the usual case needs no slow checks of abstract types
        losses = as_scalars(output["loss"]) if training else output["loss"]
    if type(output) is dict:
        output = {**output}
    output["loss"] = losses
    if "batch_size" not in output:
        output["batch_size"] = size_of_filler(data) if num_samples == 0 else infer_batch_size(data, num_samples)
    size = output["batch_size"]
    if type(size) is not int and not isinstance(size, (numbers.Real, torch.Tensor)):
        raise TypeError(f"{method} returned batch_size={size!r}; it must be a number of samples.")
    least = 0 if "num_items_in_batch" in output else 1
    if not isinstance(size, torch.Tensor) and size < least:
        is_empty = " If collate_fn has left out all samples, return also num_items_in_batch." if size == 0 else ""
        raise ValueError(f"{method} returned batch_size={size!r}; it must be at least 1.{is_empty}")
    if "num_items_in_batch" in output:
        check_items(output["num_items_in_batch"], f"{method} returned num_items_in_batch")
    if "losses" in output and not isinstance(output["losses"], Mapping):
        raise TypeError(
            f"{method} returned {type(output['losses']).__name__} as 'losses', the entry for several losses by name. "
            "Return yours under another name."
        )
    if num_samples == 0:  # a filler batch
        output["batch_size"] = 0
    if not isinstance(losses, torch.Tensor) and losses is not None:
        _add_up(output, losses)
    return output


def _add_up(output: BatchOutput, losses: Mapping[str, torch.Tensor]) -> None:
    """Make the sum of losses by name the loss of a step."""
    output["loss"] = total_loss(losses)
    if losses.keys() != {"loss"}:
        output["losses"] = losses


def mean_that_counts(mean: torch.Tensor | float, weight: torch.Tensor | float) -> torch.Tensor | float:
    """Return a mean over ``weight`` items, or 0 if there are none, as it may be NaN then. Reads from no device."""
    if not isinstance(weight, torch.Tensor):
        return mean if weight else mean.new_zeros(mean.shape) if isinstance(mean, torch.Tensor) else 0.0
    if not isinstance(mean, torch.Tensor):
        dtype = weight.dtype if weight.is_floating_point() else accumulation_dtype(weight.device)
        mean = torch.full((), mean, dtype=dtype, device=weight.device)
    return torch.where(weight.to(mean.device) == 0, 0, mean)


def check_items(items: object, name: str) -> None:
    """Check a number of items, which may be a fraction, and without reading it from a device.

    Args:
        name: what has the number, for errors
    """
    if isinstance(items, torch.Tensor):
        if items.numel() != 1:
            raise ValueError(f"{name} as a tensor of shape {tuple(items.shape)}; it must be one number.")
    elif not isinstance(items, numbers.Real):
        raise TypeError(f"{name}={items!r}; it must be a number of items.")
    elif not float(items) >= 0:
        raise ValueError(f"{name}={items!r}; it must be at least 0.")


def as_scalars(losses: Losses) -> Losses:
    """Return losses in which tensors of one element, such as tensors of shape (1,), are scalars."""
    if isinstance(losses, Mapping):
        return {name: _as_scalar(loss) for name, loss in losses.items()}
    return _as_scalar(losses)


def _as_scalar(loss: torch.Tensor) -> torch.Tensor:
    return loss.reshape(()) if loss.numel() == 1 else loss


def total_loss(losses: Losses) -> torch.Tensor:
    """Return the loss to minimise: the sum, if there are several losses by name."""
    total: torch.Tensor = reduce(operator.add, losses.values()) if isinstance(losses, Mapping) else losses
    return total


def check_loss(output: object, method: str, training: bool) -> None:
    """Check that a step returned a loss with one element, or several by name, and in training with gradients.

    In evaluation, a loss may have an element for each sample, or be ``None``.
    """
    if not isinstance(output, Mapping):
        raise TypeError(
            f"{method} must return a dict with 'loss', not {type(output).__name__}. For example: "
            "return {'loss': loss, 'model_outputs': outputs}."
        )
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
