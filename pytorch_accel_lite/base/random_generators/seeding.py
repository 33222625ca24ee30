"""Seeding random generators, and deriving and drawing seeds."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch
from accelerate.utils import set_seed

from pytorch_accel_lite.base.random_generators.reachable_objects import RandomGenerator

_MASK = (1 << 64) - 1


def derive_seed(*numbers: int, after: int = 0) -> int:
    """Combine integers into one well-distributed 64-bit seed (the finaliser of SplitMix64, Steele et al. 2014).

    Torch's generators get the upper 63 bits, ``seed >> 1``.

    Args:
        after: the result of ``derive_seed`` for preceding numbers
    """
    state = after
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def generator_with(seed: int) -> torch.Generator:
    """Return a new torch generator with a seed from ``derive_seed()``."""
    return torch.Generator().manual_seed(seed >> 1)


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed from torch's or the given generator, as torch's samplers and its ``DataLoader`` do."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def seed_run(seed: int, alike: bool = False) -> None:
    """Seed all generators at the start of a run; differently on each process, unless ``alike``."""
    set_seed(seed, device_specific=not alike)


def seed_generators(seed: int, with_torch: bool = True, with_others: bool = True) -> None:
    """Seed the generators of the CPU, which is ten times as fast as capturing and restoring their states.

    Args:
        with_torch: whether to seed torch's generator
        with_others: whether to seed Python's and NumPy's generators
    """
    if with_torch:
        # torch.manual_seed also visits every device, which costs a hundred times as much.
        torch.default_generator.manual_seed(seed >> 1)
    if with_others:
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)


def seed_held_generators(generators: Iterable[RandomGenerator], seed: int) -> None:
    """Seed generators from ``find_held_generators()``, each differently."""
    for number, generator in enumerate(generators):
        own = derive_seed(number, after=seed)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own >> 1)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(own).state
        else:
            generator.seed(own & 0xFFFFFFFF)
