"""The order of very many samples, computed where it is needed instead of drawn and stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pytorch_accel_lite.base.random_generators.seeding import derive_seed

_ROUNDS = 8
_Numbers = npt.NDArray[np.uint64]


class ComputedOrder:
    """A pseudo-random permutation of ``range(size)`` that is computed from a key and takes no memory.

    Each position is encrypted to the index of a sample by a Feistel network over the fewest bits for all indices
    (Luby and Rackoff 1988, as used for shuffling by Mitchell et al. 2021, "Bandwidth-Optimal Random Shuffling for
    GPUs"), again and again until the result is an index, which takes less than two times on average (cycle walking,
    Black and Rogaway 2002). The round function is the finaliser of SplitMix64. It is not a secure cipher: the order is
    random enough for training, but hides nothing.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._bits = max((size - 1).bit_length(), 2)
        self._keys = [np.uint64(derive_seed(key, number)) for number in range(_ROUNDS)]

    def at(self, begin: int, end: int) -> torch.Tensor:
        """Return the indices at the positions from ``begin`` to ``end``."""
        indices = self._encrypt(np.arange(begin, end, dtype=np.uint64))
        while (outside := np.flatnonzero(indices >= self._size)).size:
            indices[outside] = self._encrypt(indices[outside])
        return torch.from_numpy(indices.astype(np.int64))

    def _encrypt(self, numbers: _Numbers) -> _Numbers:
        """Permute the numbers below ``2**bits``: each round mixes one half into the other and swaps the two."""
        left = self._bits // 2
        right = self._bits - left
        for key in self._keys:
            low = numbers & np.uint64((1 << right) - 1)
            high = (numbers >> np.uint64(right)) ^ (_scrambled(low, key) & np.uint64((1 << left) - 1))
            numbers = (low << np.uint64(left)) | high
            left, right = right, left
        return numbers


def _scrambled(numbers: _Numbers, key: np.uint64) -> _Numbers:
    numbers = numbers + key
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: _Numbers = numbers ^ (numbers >> np.uint64(31))
    return scrambled
