"""Batches of samples of similar length, by a budget of tokens rather than by a number of samples."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_function, check_positive_int
from pytorch_accel_lite.extension_tools.data_and_batches import IndexedData, Sample

#: Relative resolution of lengths, a power of two, when samples are grouped.
_RESOLUTION = 16


class TokenBatchSampler(Sampler[list[int]]):
    """A batch sampler that fills each batch with samples of similar length, up to a budget of tokens with padding.

    In each epoch, samples whose lengths differ by less than a sixteenth are shuffled, then all are sorted by length and
    cut into batches, which are shuffled. The number of batches is the same in every epoch, so schedules know the length
    of an epoch. Random numbers come from torch's generator, which a trainer with a seed seeds for each epoch.

    Samples that are ``packed`` in a row need no padding, so a batch may have samples of any lengths. Which lengths
    share a batch is the same in every epoch. Best-fit decreasing (Johnson 1973) determines it: the longest samples come
    first, and each goes into the fullest batch that has room for it.

    Each process takes one batch in a step, so choose the budget by the memory of one process. If the batches of an
    epoch cannot be divided evenly, the samples of the remaining batches are divided among the processes.

    Args:
        data: the samples, or their lengths in tokens: a list, an array or a tensor of integers
        max_tokens: the maximum number of tokens in a batch: with padding, the number of samples times the greatest
            length; if ``packed``, the sum of the lengths
        length: returns the length of a sample; each sample is read once; ``None`` if ``data`` has lengths
        shuffle: whether to shuffle; otherwise the batches are the same in each epoch, as for evaluation, in the order
            of length or, if ``packed``, of packing
        packed: whether samples are put in a row without padding, as by ``PackSequences``

    Attributes:
        lengths: the length of each sample in tokens, as an array

    Raises:
        ValueError: if there is no sample, if a sample is longer than the budget, or if a length is not positive
    """

    def __init__(
        self,
        data: IndexedData,
        max_tokens: int = 4096,
        length: Callable[[Sample], int] | None = None,
        shuffle: bool = True,
        packed: bool = False,
    ) -> None:
        check_positive_int("max_tokens", max_tokens)
        if length is len:
            length = _num_tokens
        if length is not None:
            check_function("length", length)
        lengths = data if length is None else [length(data[index]) for index in range(len(data))]
        self.lengths = _checked(lengths, max_tokens)
        self.max_tokens = max_tokens
        self.shuffle = shuffle
        units = 2.0 ** np.maximum(np.frexp(self.lengths)[1] - _RESOLUTION.bit_length(), 0)
        self._groups = np.minimum(np.ceil(self.lengths / units) * units, max_tokens).astype(np.int64)
        numbers = (_pack if packed else _cut)(np.sort(self._groups).tolist(), max_tokens)
        self._batch_order = np.argsort(numbers, kind="stable")
        self._bounds = [0, *np.cumsum(np.bincount(numbers)).tolist()]

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of the samples of each batch."""
        size = len(self.lengths)
        order = torch.randperm(size).numpy() if self.shuffle else np.argsort(self.lengths, kind="stable")
        order = order[np.argsort(self._groups[order], kind="stable")][self._batch_order]
        for number in torch.randperm(len(self)).tolist() if self.shuffle else range(len(self)):
            yield order[self._bounds[number] : self._bounds[number + 1]].tolist()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._bounds) - 1

    def __repr__(self) -> str:
        return f"TokenBatchSampler({len(self.lengths)} samples, max_tokens={self.max_tokens}, {len(self)} batches)"


def _num_tokens(sample: Sample) -> int:
    if isinstance(sample, Mapping):
        raise TypeError(
            f"length=len of a dict is the number of its keys, here {len(sample)}. Pass the length of its tokens, such "
            "as length=lambda sample: len(sample['input_ids'])."
        )
    return len(sample)


def _checked(values: object, max_tokens: int) -> npt.NDArray[np.int64]:
    lengths = np.asarray(values)
    if not lengths.size or lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"TokenBatchSampler needs the length of each sample, a sequence of integers, not {type(values).__name__} "
            f"of shape {lengths.shape} and type {lengths.dtype}. Pass samples with a length function, such as "
            "TokenBatchSampler(data, length=len), or pass lengths."
        )
    for index in np.flatnonzero((lengths < 1) | (lengths > max_tokens))[:1].tolist():
        raise ValueError(
            f"Sample {index} has length {lengths[index]}, but lengths must be from 1 to max_tokens={max_tokens}. Leave "
            "it out, cut it, or raise max_tokens."
        )
    return lengths.astype(np.int64)


def _cut(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Return the batch number of each sample for batches with padding, given the sorted lengths."""
    numbers: list[int] = []
    number = first = 0
    for index, length in enumerate(lengths):
        if (index + 1 - first) * length > max_tokens:
            number, first = number + 1, index
        numbers.append(number)
    return numbers


def _pack(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Return the batch number of each sample for packed batches, given the sorted lengths."""
    numbers: list[int] = []
    rooms: list[tuple[int, int]] = []  # the room left in each open batch, and its number
    count = 0
    for length in reversed(lengths):
        fullest = bisect_left(rooms, (length, 0))
        if fullest == len(rooms):
            rooms.append((max_tokens, count))
            count += 1
        room, number = rooms.pop(fullest)
        if room - length >= lengths[0]:
            insort(rooms, (room - length, number))
        numbers.append(number)
    return numbers[::-1]
