"""Seeds and generators: deriving, finding, capturing and restoring them."""

from pytorch_accel_lite.base.machine.deterministic_kernels import deterministic_kernels
from pytorch_accel_lite.base.random_generators.generator_states import (
    capture_generators,
    find_held_generators,
    modules_with_generators,
    preserving_generators,
    preserving_held_generators,
    restore_generator,
    restore_generators,
    state_of_generator,
)
from pytorch_accel_lite.base.random_generators.reachable_objects import RandomGenerator
from pytorch_accel_lite.base.random_generators.seeding import (
    derive_seed,
    draw_seed,
    generator_with,
    seed_all,
    seed_generators,
    seed_held_generators,
)

__all__ = [
    "RandomGenerator", "capture_generators", "derive_seed", "deterministic_kernels", "draw_seed",
    "find_held_generators", "generator_with", "modules_with_generators", "preserving_generators",
    "preserving_held_generators", "restore_generator", "restore_generators", "seed_all", "seed_generators",
    "seed_held_generators", "state_of_generator",
]  # fmt: skip
