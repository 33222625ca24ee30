"""Batches of samples of similar length, by a budget of tokens rather than by a number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from pytorch_accel_lite.base.validation import check_positive_int

#: Lengths are told apart up to one part in this number, a power of two, when samples are grouped by them.
_RESOLUTION = 16


class TokenBatchSampler(Sampler[list[int]]):
    """A batch sampler: as many samples of similar length in each batch as a budget of tokens holds, padding included.

    In each epoch, samples whose lengths differ by less than a sixteenth are shuffled, all are put in order of length
    and cut into batches, which are shuffled. The number of batches is the same in every epoch, so the length of an
    epoch is known to schedules. Random numbers are torch's: the trainer seeds them for each epoch, if it has a seed.

    Each process takes one batch in a step, so the budget is that of one process, and its memory's. If the batches of
    an epoch do not divide evenly, the samples of those that are left are divided among the processes.

    :param data: the samples, or their lengths in tokens: a list, an array or a tensor of integers
    :param max_tokens: the most tokens in a batch after padding: its number of samples times its greatest length
    :param length: returns the length of a sample, each of which is read once; ``None`` if ``data`` are lengths
    :param shuffle: whether to shuffle; otherwise batches go from the shortest to the longest samples, as evaluation
        may, and are the same in each epoch
    :raises ValueError: if there is no sample, if a sample is longer than the budget, or if a length is not positive
    """

    def __init__(
        self, data: Any, max_tokens: int = 4096, length: Callable[[Any], int] | None = None, shuffle: bool = True
    ) -> None:
        check_positive_int("max_tokens", max_tokens)
        given = data if length is None else [length(data[index]) for index in range(len(data))]
        self.lengths = _checked(given, max_tokens)
        self.max_tokens = max_tokens
        self.shuffle = shuffle
        units = 2.0 ** np.maximum(np.frexp(self.lengths)[1] - _RESOLUTION.bit_length(), 0)
        self._groups = np.minimum(np.ceil(self.lengths / units) * units, max_tokens).astype(np.int64)
        self._bounds = _cut(np.sort(self._groups).tolist(), max_tokens)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of the samples of each batch."""
        size = len(self.lengths)
        order = torch.randperm(size).numpy() if self.shuffle else np.argsort(self.lengths, kind="stable")
        order = order[np.argsort(self._groups[order], kind="stable")]
        for number in torch.randperm(len(self)).tolist() if self.shuffle else range(len(self)):
            yield order[self._bounds[number] : self._bounds[number + 1]].tolist()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._bounds) - 1

    def __repr__(self) -> str:
        return f"TokenBatchSampler({len(self.lengths)} samples, max_tokens={self.max_tokens}, {len(self)} batches)"


def _checked(given: Any, max_tokens: int) -> npt.NDArray[np.int64]:
    lengths = np.asarray(given)
    if not lengths.size or lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"TokenBatchSampler needs the length of each sample, a sequence of integers, not {type(given).__name__} "
            f"of shape {lengths.shape} and type {lengths.dtype}. Pass samples with a length function, such as "
            "TokenBatchSampler(data, length=len), or pass lengths."
        )
    for is_wrong, problem in (
        (lengths < 1, "has length {}, which is not positive. Leave it out"),
        (lengths > max_tokens, f"has length {{}}, more than max_tokens={max_tokens}. Cut it, or raise max_tokens"),
    ):
        for index in np.flatnonzero(is_wrong)[:1].tolist():
            raise ValueError(f"Sample {index} {problem.format(lengths[index])}.")
    return lengths.astype(np.int64)


def _cut(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Return the bounds of the batches of samples in order of length."""
    bounds = [0]
    for index, length in enumerate(lengths):
        if (index + 1 - bounds[-1]) * length > max_tokens:
            bounds.append(index)
    return [*bounds, len(lengths)]
