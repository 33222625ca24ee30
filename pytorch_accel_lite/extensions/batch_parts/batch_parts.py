"""Computing a batch in parts: splitting it, keeping the losses of a part as returned, and merging the outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, pairwise

import torch
from accelerate.utils import recursively_apply

from pytorch_accel_lite.data import Batch, BatchData
from pytorch_accel_lite.extending import BatchOutput, TrainerLike
from pytorch_accel_lite.extension_tools.data_and_batches import (
    WHAT_CAN_BE_SPLIT,
    concatenate,
    infer_batch_size,
    is_as_long,
    is_list_of_samples,
    is_number,
    mean_that_counts,
    parts_in,
    slice_batch,
    tensors_in,
)
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import Count
from pytorch_accel_lite.extension_tools.plain_types import Tree


def split_into_parts(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into parts that together weigh as much in the window as the full batch.

    A filler batch has no weight. If it repeats a full batch, as in streams, only its first part is computed.
    """
    if parts <= 1 or (batch.is_filler and batch.indices is not None):
        return [batch]
    if batch.is_filler:
        first = _split_batch(batch.data, parts, infer_batch_size(batch.data))[0]
        return [batch._replace(data=first[0])]
    begin = 0
    pieces: list[Batch] = []
    for data, size in _split_batch(batch.data, parts, infer_batch_size(batch.data, batch.num_samples)):
        part = batch._replace(
            data=data,
            num_samples=None if batch.num_samples is None else size,
            total_samples=0 if batch.total_samples is not None and pieces else batch.total_samples,
            indices=None if batch.indices is None else batch.indices[begin : begin + size],
        )
        pieces.append(part)
        begin += size
    return pieces


def _split_batch(batch: BatchData, parts: int, size: int) -> list[tuple[BatchData, int]]:
    """Split a batch as evenly as possible, and return each part with its size.

    What ``select_samples()`` selects in is split. Anything else is repeated in every part.

    Args:
        parts: number of parts, capped at the number of samples
        size: number of samples in the batch

    Raises:
        ValueError: if nothing in the batch has an element for each sample, or if an object that cannot be split has
    """
    if not any(is_as_long(part, size) for part in parts_in([batch])):
        raise ValueError(
            f"A batch of type {type(batch).__name__} cannot be split into micro-batches: nothing in it has an element "
            f"for each of its {size} samples. {WHAT_CAN_BE_SPLIT}"
        )
    parts = max(min(parts, size), 1)  # collate_fn may have left out all samples
    bounds = [size * part // parts for part in range(parts + 1)]
    return [(slice_batch(batch, begin, end, size), end - begin) for begin, end in pairwise(bounds)]


def as_returned(trainer: TrainerLike, output: BatchOutput) -> BatchOutput:
    """Return a copy of the losses in a step's output, as the step returned them, for recording.

    Steps that record losses only after the backward pass call this before it, because callbacks may change the loss.
    """
    if not trainer.callback_handler.listeners["on_backward_start"]:
        return output
    names = ("loss", "losses", "batch_size", "num_items_in_batch")
    kept = {name: output[name] for name in names if name in output}
    return recursively_apply(lambda value: value.detach().clone(), kept)  # type: ignore[no-any-return]


def merge_outputs(outputs: Sequence[BatchOutput]) -> BatchOutput:
    """Merge the outputs of the parts into the output of a step on the full batch."""
    if len(outputs) == 1:
        return outputs[0]
    shares = _shares(outputs, "num_items_in_batch" if "num_items_in_batch" in outputs[0] else "batch_size")
    sizes = [output["batch_size"] for output in outputs]
    merged: BatchOutput = {}
    for key in outputs[0]:
        values = [output[key] for output in outputs]
        if key in ("batch_size", "num_items_in_batch"):
            merged[key] = sum(values)
        elif key == "loss":
            merged[key] = _merge_losses(values, shares, sizes)
        elif key == "losses":
            names = dict.fromkeys(chain.from_iterable(values))
            merged[key] = {
                name: _merge_losses([losses.get(name, 0) for losses in values], shares, sizes) for name in names
            }
        elif all(map(is_number, values)):
            merged[key] = _mean(values, _shares(outputs, "batch_size"))
        else:
            merged[key] = _join(values, _shares(outputs, "batch_size"), sizes)
    return merged


def _merge_losses(losses: list[Tree], shares: list[Count], sizes: list[int]) -> Tree:
    """Return the mean of the losses of the parts. Losses of each sample, as in evaluation, are put together."""
    has_rows = [isinstance(loss, torch.Tensor) and loss.ndim > 0 for loss in losses]
    if all(has_rows) and [len(loss) for loss in losses] == sizes:
        with suppress(RuntimeError):  # rows may have other lengths in each part
            return torch.cat(losses)
    if any(has_rows):
        losses = [_mean_of_rows(loss) if has else loss for loss, has in zip(losses, has_rows, strict=True)]
    return _mean(losses, shares)


def _mean_of_rows(losses: torch.Tensor) -> torch.Tensor:
    return (losses if losses.is_floating_point() else losses.float()).mean()  # samples may be right or wrong


def _join(values: list[Tree], shares: list[Count], sizes: list[int]) -> Tree:
    """Concatenate nested outputs of the parts. Scalars, such as a loss, are averaged."""
    first = values[0]
    if all(value is None for value in values):
        return None
    if all(isinstance(value, torch.Tensor) and is_number(value) for value in values):
        return _mean(values, shares)
    if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
        joined = copy.copy(first)  # outputs of Hugging Face models also have attributes
        for key in first:
            joined[key] = _join([value[key] for value in values], shares, sizes)
        return joined
    if type(first) is tuple and all(len(value) == len(first) for value in values):
        return tuple(_join(list(elements), shares, sizes) for elements in zip(*values, strict=True))
    if _are_lists_of_samples(values, sizes):
        return list(chain.from_iterable(values))
    return concatenate_if_possible(values)


def _are_lists_of_samples(values: list[Tree], sizes: list[int]) -> bool:
    """Whether outputs certainly are lists with an element for each sample, as detectors return."""
    pairs = list(zip(values, sizes, strict=True))
    if not all(type(value) is list and is_list_of_samples(value, size) for value, size in pairs):
        return False
    elements = [(element, size) for value, size in pairs for element in value]
    return any(isinstance(element, dict) or not is_as_long(element, size) for element, size in elements)


def _shares(outputs: Sequence[BatchOutput], counted: str) -> list[Count]:
    """Return the weight of each output as a fraction of the total weight; zeros if the total is zero."""
    total = sum(output[counted] for output in outputs)
    total = torch.where(total == 0, 1, total) if isinstance(total, torch.Tensor) else total or 1
    return [output[counted] / total for output in outputs]


def _mean(values: list[Tree], shares: list[Count]) -> Tree:
    """Return the weighted mean of values. Values with weight zero, such as means over no items, do not count."""
    if all(value is None for value in values):  # an evaluation may have no loss
        return None
    return sum(mean_that_counts(value, share) * share for value, share in zip(values, shares, strict=True))


def concatenate_if_possible(parts: Sequence[Tree]) -> Tree:
    """Concatenate nested outputs along their first dimension, or lists; return the list of parts if that fails."""
    if next(tensors_in(parts), None) is None:
        return list(chain(*parts)) if isinstance(parts[0], list) else list(parts)
    try:
        return concatenate(parts)
    except (ValueError, TypeError, KeyError):
        return list(parts)
