"""Random numbers: seeding the generators, keeping their states, and putting them back. Nobody else touches them.

The generators are those of python, numpy and torch, and that of torch for this process's GPU or other accelerator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from pytorch_accel_lite.devices import available_accelerator, module_of

_MASK = (1 << 64) - 1


def mix(*numbers: int, after: int = 0) -> int:
    """Combine whole numbers into one well-spread 64-bit seed (the finaliser of SplitMix64, Steele et al. 2014).

    :param after: what ``mix`` returned for the numbers that come before these
    """
    state = after
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_run(seed: int) -> None:
    """Seed all generators at the start of a run, on each process another way."""
    set_seed(seed, device_specific=True)


def seed_generators(seed: int) -> None:
    """Seed the generators of the CPU: python's, numpy's and torch's."""
    # torch.manual_seed also visits every device, which costs a hundred times as much.
    torch.default_generator.manual_seed(seed >> 1)
    seed_python(seed)


def seed_python(seed: int) -> None:
    """Seed python's and numpy's generators, which is ten times as fast as keeping and restoring their states."""
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def capture_generators() -> dict[str, Any]:
    """Return the states of all generators, as they can be stored in a training state."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    accelerator = available_accelerator()
    if accelerator is not None:
        states[accelerator.type] = module_of(accelerator).get_rng_state()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Restore states returned by :func:`capture_generators`."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    accelerator = available_accelerator()
    if accelerator is not None and accelerator.type in states:
        module_of(accelerator).set_rng_state(states[accelerator.type])


@contextmanager
def preserving_python() -> Iterator[None]:
    """Restore python's and numpy's generators after a block of code."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def preserving_generators() -> Iterator[None]:
    """Restore all generators after a block of code."""
    states = capture_generators()
    try:
        yield
    finally:
        restore_generators(states)
