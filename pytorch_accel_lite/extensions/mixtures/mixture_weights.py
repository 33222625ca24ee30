"""The weights of a mixture, and the shares of its samples that they give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_range, did_you_mean


def check_mixture_weights(
    weights: Mapping[str, float], names: list[str], may_be_zero: bool = False
) -> dict[str, float]:
    """Return the weights in the order of the datasets, after checking that each dataset has a positive one.

    Args:
        may_be_zero: whether some, but not all, may be 0
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a dict of numbers by name of the dataset, not {type(weights).__name__}.")
    for name, value in weights.items():
        if name not in names:
            existing = ", ".join(map(repr, names))
            raise ValueError(
                f"weights has {name!r}, which is not one of the datasets {existing}.{did_you_mean(str(name), names)}"
            )
        if not (may_be_zero and value == 0):
            check_range(f"weights[{name!r}]", value, above=0)
    for name in names:
        if name not in weights:
            raise ValueError(f"weights has nothing for the dataset {name!r}. Give it a weight, or leave it out.")
    if not any(weights.values()):
        raise ValueError(f"weights={dict(weights)!r} are all 0. Give at least one dataset a weight.")
    return {name: weights[name] for name in names}


class Stretch(NamedTuple):
    """A part of an epoch with constant shares. The sequences have a number for each dataset.

    Args:
        begin: number of samples in the epoch before the stretch
        rates: number of samples in a whole epoch with these shares
        due: number of samples that were due before the stretch, as a fraction
        given: number of samples taken before the stretch
    """

    begin: int
    rates: Sequence[float]
    due: Sequence[float]
    given: Sequence[int]

    def choose(self, length: int, size: int) -> torch.Tensor:
        """Return the number of the dataset of each of the first samples.

        Sample ``i`` of a dataset is taken when ``i + 0.5`` are due, so shares hold in every part of an epoch, even if
        they change after each update.

        Args:
            length: number of samples to choose
            size: number of samples in an epoch
        """
        spare = 2 * len(self.rates) + 2  # the sums of due and of given samples may differ by this
        numbers, times = [], []
        for number, (rate, due, given) in enumerate(zip(self.rates, self.due, self.given, strict=True)):
            if rate:
                last = math.ceil(due + rate * (length + spare) / size + 1)
                samples = torch.arange(given, max(last, given), dtype=torch.float64)
                times.append((samples + 0.5 - due) / rate)
                numbers.append(torch.full((len(samples),), number))
        return torch.cat(numbers)[torch.cat(times).argsort(stable=True)[:length]]

    def followed_by(self, begin: int, shares: Sequence[float], size: int) -> Stretch:
        """Return a stretch with other shares that begins within this one.

        Args:
            begin: number of samples in the epoch before it
            size: number of samples in an epoch
        """
        length = begin - self.begin
        counts = self.choose(length, size).bincount(minlength=len(shares)).tolist()
        return Stretch(
            begin,
            [share * size for share in shares],
            [due + rate * length / size for due, rate in zip(self.due, self.rates, strict=True)],
            [given + count for given, count in zip(self.given, counts, strict=True)],
        )


def choose_all(stretches: Sequence[Stretch], size: int) -> torch.Tensor:
    """Return the number of the dataset of each sample in an epoch."""
    ends = [*(stretch.begin for stretch in stretches[1:]), size]
    return torch.cat([stretch.choose(end - stretch.begin, size) for stretch, end in zip(stretches, ends, strict=True)])


def divide(shares: Sequence[float], size: int) -> list[int]:
    """Divide the samples of an epoch in proportion to shares, by Webster's method (1832)."""
    positive = [share for share in shares if share]
    counts = [max(math.ceil(share * (size - len(positive)) - 0.5), 0) for share in shares]
    while sum(counts) < size:
        following = min((k for k, share in enumerate(shares) if share), key=lambda k: (counts[k] + 0.5) / shares[k])
        counts[following] += 1
    return counts


def whole_epoch(counts: Sequence[int]) -> Stretch:
    """Return an epoch with constant shares as a single stretch."""
    return Stretch(0, counts, [0.0] * len(counts), [0] * len(counts))


def added_up(stages: dict[int, list[int]], others: dict[int, list[int]], epoch: int) -> list[int]:
    """Return the number of samples of each dataset before an epoch.

    Args:
        stages: the samples in an epoch by the first epoch of each stage
        others: the samples in single epochs that differ from their stage
    """
    bounds = [*stages, epoch]
    lengths = [max(min(end, epoch) - first, 0) for first, end in pairwise(bounds)]
    parts = [[count * length for count in counts] for counts, length in zip(stages.values(), lengths, strict=True)]
    for number, counts in others.items():
        if number < epoch:
            of_stage = stages[max(first for first in stages if first <= number)]
            parts.append([count - usual for count, usual in zip(counts, of_stage, strict=True)])
    return [sum(counts) for counts in zip(*parts, strict=True)]
