"""The outputs of steps: checked and completed, and concatenated over several batches."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TypeAlias

import torch
from accelerate.utils import recursively_apply
from accelerate.utils.operations import honor_type

from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.machine import accumulation_dtype, await_processes
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.values import is_dataclass, tensors_in
from pytorch_accel_lite.data.batches import infer_batch_size, is_list_of_samples, size_of_filler
from pytorch_accel_lite.data.sources import BatchData, BatchOutput

#: A loss, or several by name.
Losses: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor]
_EXAMPLE = "For example: return {'loss': loss, 'model_outputs': outputs}."


def complete_output(output: BatchOutput, data: BatchData, num_samples: int | None, method: str, training: bool) -> None:
    """Check the output of a step and add missing entries.

    Args:
        data: the batch
        num_samples: number of samples collated into the batch, or ``None`` if unknown
        method: name of the method that returned the output, for errors
    """
    losses = output.get("loss") if type(output) is dict else None
    if not (isinstance(losses, torch.Tensor) and losses.ndim == 0 and (losses.requires_grad or not training)):
        check_loss(output, method, training)  # the usual case needs no slow checks of abstract types
        losses = output["loss"] = as_scalars(output["loss"]) if training else output["loss"]
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


_BYTES_OF_A_CHUNK = 2**25


class ListOfSamples(list[Tree]):
    """Outputs with an arbitrary element for each sample, as returned by detection models."""


def to_cpu(
    outputs: Tree, size: int | None = None, copy: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
) -> Tree:
    """Return nested outputs as tensors on the CPU, in plain tuples, lists and dicts.

    Entries without a sample dimension, such as a mean loss, and entries that are not tensors are dropped from dicts;
    elsewhere they raise an error.

    Args:
        size: number of samples, so that a list with an element for each sample is recognised and kept
        copy: copies a tensor to the CPU
    """
    is_of_samples = size is not None and type(outputs) is list and is_list_of_samples(outputs, size)
    if is_of_samples or isinstance(outputs, ListOfSamples):
        return ListOfSamples(recursively_apply(lambda tensor: copy(await_processes(tensor.detach())), list(outputs)))
    if isinstance(outputs, torch.Tensor):
        if not outputs.ndim:
            raise ValueError("predict: the model returned a tensor without a sample dimension.")
        return copy(await_processes(outputs.detach() if outputs.requires_grad else outputs))
    if is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    if isinstance(outputs, Mapping):
        return {k: to_cpu(v, size, copy) for k, v in outputs.items() if next(tensors_in(v), None) is not None}
    if isinstance(outputs, (list, tuple)):
        return honor_type(outputs, (to_cpu(part, size, copy) for part in outputs))
    raise TypeError(
        f"predict: the model returned {type(outputs).__name__}, but must return tensors, or tuples, lists or dicts of "
        "tensors. Override calculate_predict_batch_output to convert its outputs."
    )


def concatenate(parts: Sequence[Tree]) -> Tree:
    """Concatenate nested outputs of the same structure along their first dimension."""
    first = parts[0]
    if any(isinstance(part, ListOfSamples) for part in parts):
        return ListOfSamples(itertools.chain(*parts))
    if isinstance(first, torch.Tensor):
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:
            raise ValueError(
                f"predict: outputs of shapes {sorted({tuple(p.shape[1:]) for p in parts})} per sample cannot be "
                "concatenated. Pad them to one shape in calculate_predict_batch_output."
            ) from error
    if isinstance(first, Mapping):
        if of_some := set().union(*parts) - set(first).intersection(*parts):
            raise ValueError(
                f"predict: only for some batches, the model returned {listed(sorted(map(repr, of_some)))} with a "
                "sample dimension. Return the same tensors in calculate_predict_batch_output for each batch, also for "
                "one of a single sample."
            )
        return {key: concatenate([part[key] for part in parts]) for key in first}
    if len({len(part) for part in parts}) > 1:
        raise ValueError(
            f"predict: the model returned lists of {sorted({len(part) for part in parts})} elements, which cannot be "
            "concatenated. Return tensors or dicts in calculate_predict_batch_output, or a list with one per sample."
        )
    return honor_type(first, map(concatenate, zip(*parts, strict=True)))


class Concatenation:
    """Concatenates nested outputs as they come, without ever taking their memory twice.

    Outputs are collected in large chunks, and each chunk is freed as soon as it has been copied. Small tensors would
    not do: an allocator reuses their memory for other small tensors, but does not return it.
    """

    def __init__(self) -> None:
        self._chunks: list[Tree] = []
        self._parts: list[Tree] = []
        self._bytes = 0

    def add(self, parts: Sequence[Tree]) -> None:
        """Append outputs of the same structure."""
        self._parts.extend(parts)
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(parts))
        if self._bytes >= _BYTES_OF_A_CHUNK:
            self._end_chunk()

    def result(self) -> Tree:
        """Return all outputs, concatenated along their first dimension, and forget them."""
        if self._parts:
            self._end_chunk()
        chunks, self._chunks = self._chunks, []
        flattened = [torch.utils._pytree.tree_flatten(chunk) for chunk in chunks]
        columns = [list(column) for column in zip(*(leaves for leaves, _ in flattened), strict=False)]
        structure = flattened[0][1]
        if any(found != structure for _, found in flattened) or not all(map(_are_alike, columns)):
            return concatenate(chunks)
        del chunks, flattened
        return torch.utils._pytree.tree_unflatten(list(map(_concatenate_and_free, columns)), structure)

    def _end_chunk(self) -> None:
        self._chunks.append(concatenate(self._parts))
        self._parts, self._bytes = [], 0


def _are_alike(column: Sequence[Tree]) -> bool:
    """Whether all values are tensors of one type that differ only in their lengths."""
    first = column[0]
    return all(
        type(part) is torch.Tensor and part.dtype == first.dtype and part.shape[1:] == first.shape[1:]
        for part in column
    )


def _concatenate_and_free(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors and empty the list from its end, so that the tensor allocated last is freed first."""
    if len(parts) == 1:
        return parts.pop()
    end = sum(map(len, parts))
    whole = parts[0].new_empty(end, *parts[0].shape[1:])
    while parts:
        part = parts.pop()
        whole[end - len(part) : end] = part
        end -= len(part)
    return whole
