"""Random generators: their states, those that objects hold, seeding and drawing seeds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import set_seed

from pytorch_accel_lite.base.reachable_objects import RandomGenerator, is_generator, reachable_from
from pytorch_accel_lite.base.types import StateDict


def capture_generators() -> StateDict:
    """Return the states of all generators, in a form that a training state can store."""
    version, numbers, cached = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {
        # As a tensor, hundreds of numbers are copied and written at once.
        "python": (version, torch.from_numpy(np.array(numbers, dtype=np.int64)), cached),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        **{name: module.get_rng_state() for name, module in modules_with_generators(only_used=True).items()},
    }


def restore_generators(states: StateDict) -> None:
    """Restore states returned by ``capture_generators()``, or some of them."""
    if "python" in states:
        version, numbers, cached = states["python"]
        random.setstate((version, tuple(torch.as_tensor(numbers).tolist()), cached))  # up to 0.2, states have a tuple
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    for name, module in modules_with_generators().items():
        if name in states:  # a training state saved without a GPU has no entry for it
            module.set_rng_state(states[name])


@contextmanager
def preserving_generators(*only: str) -> Iterator[None]:
    """Restore the states of all generators after a block, or ``only`` of the named generators."""
    states = capture_generators()
    kept = {name: states[name] for name in only or states}
    try:
        yield
    finally:
        restore_generators(kept)


def modules_with_generators(only_used: bool = False) -> dict[str, ModuleType]:
    """Return the modules that get and set the states of torch's generators, by their names in a training state.

    Args:
        only_used: whether to leave out a GPU that nothing has used, while Accelerate computes on the CPU: to ask for
            the state of its generator takes memory of the GPU, which others may need
    """
    modules: dict[str, ModuleType] = {"torch": torch}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        device = vars(PartialState)["_shared_state"].get("device", accelerator)
        is_unused = device.type == "cpu" and not getattr(module, "is_initialized", lambda: True)()
        if not (only_used and is_unused):
            modules[accelerator.type] = module
    return modules


def find_held_generators(roots: Iterable[object], in_loaders: bool = False) -> list[RandomGenerator]:
    """Return the random generators that objects hold, see ``reachable_from()``, except the global generators.

    Examples are the generators of albumentations' and MONAI's transforms, and generators that functions enclose or use
    as a global variable.
    """
    usual = (random.random, np.random.random_sample)  # methods of the global generators
    excluded = {id(torch.default_generator), *(id(getattr(method, "__self__", None)) for method in usual)}
    return [item for item in reachable_from(roots, in_loaders) if is_generator(item) and id(item) not in excluded]


def state_of_generator(generator: RandomGenerator) -> object:
    """Return the state of a generator of any kind."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def restore_generator(generator: RandomGenerator, state: Any) -> None:
    """Restore a state from ``state_of_generator()``."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


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
