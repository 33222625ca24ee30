"""Seeds and generators: deriving, finding, capturing and restoring them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pytorch_accel_lite.base.machine import deterministic_kernels
from pytorch_accel_lite.base.random_generators import (
    capture_generators,
    derive_seed,
    draw_seed,
    find_held_generators,
    generator_with,
    modules_with_generators,
    preserving_generators,
    restore_generator,
    restore_generators,
    seed_generators,
    seed_held_generators,
    state_of_generator,
)
from pytorch_accel_lite.base.reachable_objects import RandomGenerator, is_generator

__all__ = [
    "RandomGenerator", "capture_generators", "derive_seed", "deterministic_kernels", "draw_seed",
    "find_held_generators", "generator_with", "is_generator", "modules_with_generators", "preserving_generators",
    "preserving_held_generators", "restore_generator", "restore_generators", "seed_all", "seed_generators",
    "seed_held_generators", "state_of_generator",
]  # fmt: skip


@contextmanager
def preserving_held_generators(generators: Iterable[RandomGenerator]) -> Iterator[None]:
    """Restore the states of generators from ``find_held_generators()`` after a block."""
    states = [(generator, state_of_generator(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            restore_generator(generator, state)


def seed_all(seed: int) -> None:
    """Seed the generators of the CPU and, if there is one, of this process's GPU or other accelerator."""
    seed_generators(seed)
    for name, module in modules_with_generators().items():
        if name != "torch":
            module.manual_seed(seed >> 1)
