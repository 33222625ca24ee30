"""Random generators: where objects hold them, their states, seeding and drawing seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeGuard, TypeVar, get_args

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.user_code import is_in_this_package, is_installed, users_classes

T = TypeVar("T")

#: A random generator, of a kind that objects may hold.
RandomGenerator: TypeAlias = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_GENERATORS = get_args(RandomGenerator)
#: Types that are never searched.
_DATA = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic)
_MOST_REACHED = 10_000  # objects
_MOST_PARTS = 1000  # parts of a list or dict


def reachable_from(roots: Iterable[object], in_loaders: bool = False) -> list[object]:
    """Return objects and their contents at any depth: attributes, short lists and dicts, and what functions use.

    Functions hold the objects that they enclose, are bound to, or have as defaults; user functions also hold the
    globals that they use, and methods hold their object. Lists that begin with data, and long lists and dicts, are not
    searched: they hold samples. Nor are objects of this package, except datasets.

    Args:
        in_loaders: whether to search the contents of a ``DataLoader``
    """
    excluded = (*_DATA, ModuleType, type) if in_loaders else (*_DATA, ModuleType, type, DataLoader)
    reached: dict[int, object] = {}
    left = [*roots]
    while left and len(reached) < _MOST_REACHED:
        item = left.pop()
        if id(item) in reached or is_a(item, *excluded):
            continue
        reached[id(item)] = item
        left += parts_held(item)
    return [*reached.values()]


def is_a(item: object, *kinds: type[T]) -> TypeGuard[T]:
    """Like ``isinstance``, but a proxy counts as a proxy rather than as its target."""
    return issubclass(type(item), kinds)


def is_generator(item: object) -> TypeGuard[RandomGenerator]:
    """Whether an object is a random generator."""
    return issubclass(type(item), _GENERATORS)


def parts_held(item: object) -> list[object]:
    """Return the objects that an object holds directly, see ``reachable_from()``."""
    if is_a(item, list, tuple):
        is_data = not item or len(item) > _MOST_PARTS or is_a(item[0], *_DATA, list, tuple, dict)
        return [] if is_data else [*item]
    if is_a(item, dict):
        return [*item.values()] if len(item) <= _MOST_PARTS else []
    if is_a(item, FunctionType):
        return [*_used_by(item)]
    if is_a(item, MethodType):
        return [item.__self__, item.__func__]
    if not is_a(item, Dataset) and any(is_in_this_package(kind.__module__) for kind in type(item).__mro__):
        return []
    if type(item).__module__.startswith("datasets."):  # a dataset's order follows from its seed and set_epoch
        return [value for value in attributes_of(item).values() if not is_generator(value)]
    called = [item.func, item.args, item.keywords] if is_a(item, partial) else []
    return [*called, *attributes_of(item).values(), *_of_its_class(item)]


def attributes_of(item: object) -> dict[str, object]:
    """Return the attributes of an object by name, including slots."""
    slots = [name for kind in type(item).__mro__ for name in _slot_names(vars(kind).get("__slots__", ()))]
    found = {**{name: getattr(item, name) for name in slots if hasattr(item, name)}, **getattr(item, "__dict__", {})}
    return {name: value for name, value in found.items() if name != "_iterator"}  # a DataLoader's, with its workers


def _slot_names(slots: str | Iterable[str]) -> list[str]:
    names = [slots] if isinstance(slots, str) else [*slots]
    return [name for name in names if not name.startswith("__")]


def _of_its_class(item: object) -> Iterator[object]:
    """Yield generators in class attributes and, from the user's classes, all attributes, including methods."""
    users = users_classes(item)
    for kind in type(item).__mro__:
        for value in vars(kind).values():
            if is_generator(value):
                yield value
            elif kind in users:
                function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if is_a(function, FunctionType) or type(function).__module__ != "builtins":
                    yield function


def _used_by(function: FunctionType) -> Iterator[object]:
    """Yield the objects that a function encloses or has as defaults; for user functions, also the globals in use."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            continue
    yield function.__defaults__ or ()
    yield function.__kwdefaults__ or {}
    yield function.__dict__
    if not is_installed(function.__code__):
        names = {name for code in codes_in(function.__code__) for name in code.co_names}
        yield from (function.__globals__[name] for name in sorted(names & function.__globals__.keys()))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def nested_in(root: object, is_kind: Callable[[object], bool]) -> list[object]:
    """Return an object and the objects of a kind inside it: in attributes, and in lists and dicts among them.

    Lists that begin with an object of another kind are not searched, because they may be long.
    """
    nested = [root]
    seen = {id(root)}
    for item in nested:  # grows in the loop
        for value in getattr(item, "__dict__", {}).values():
            values = list(value.values()) if isinstance(value, dict) else value
            parts = values if isinstance(values, (list, tuple)) else [value]
            for part in parts if parts and is_kind(parts[0]) else []:
                if is_kind(part) and id(part) not in seen:
                    seen.add(id(part))
                    nested.append(part)
    return nested


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
