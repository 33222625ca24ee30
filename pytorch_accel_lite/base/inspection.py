"""Inspecting objects: their origin, overridden methods, lengths, memory."""

from __future__ import annotations

import inspect
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TypeAlias, TypeGuard, TypeVar, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pytorch_accel_lite.base.environment import LIBRARIES, is_in_this_package, is_of_library

T = TypeVar("T")

#: A random generator, of a kind that objects may hold.
RandomGenerator: TypeAlias = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
#: What holds nothing to look for.
_DATA = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic)
_GENERATORS = get_args(RandomGenerator)
_MOST_REACHED = 10_000  # objects
_MOST_PARTS = 1000  # of a list or dict
_OWN_FILES = str(Path(__file__).parents[1]) + os.sep


def is_ours(thing: object) -> bool:
    """Whether a class or a function belongs to this package, rather than to its user."""
    return is_in_this_package(getattr(thing, "__module__", ""))


def checked_by(error: BaseException) -> str:
    """Return the module of this package whose check raised an error, whose message needs no notes; or nothing."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    is_check = isinstance(error, (ValueError, TypeError, RuntimeError)) and is_in_this_package(module)
    return module if is_check else ""


def is_overridden(instance: object, method: str) -> bool:
    """Whether the user's own class overrides a method of ours."""
    return not is_ours(getattr(type(instance), method))


def overridden_methods(instance: object) -> frozenset[str]:
    """Return the names of all methods of ours that the user's own class, or one that it inherits from, overrides."""
    users = [kind for kind in type(instance).__mro__ if kind is not object and not is_ours(kind)]
    names = {name for kind in users for name in vars(kind)}
    return frozenset(name for name in names if is_overridden(instance, name))


def find_length(thing: object) -> int | None:
    """Return ``len(thing)``, or ``None`` if it has no length."""
    try:
        return len(thing) if isinstance(thing, Sized) else None
    except TypeError:
        return None


def nested_in(root: object, is_kind: Callable[[object], bool]) -> list[object]:
    """Return an object and those of a kind inside it: its attributes, and the elements of lists and dicts among them.

    Lists that begin with an object of another kind are not searched, as they may be long.
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


def reachable_from(roots: Iterable[object], in_loaders: bool = False) -> list[object]:
    """Return objects and what they hold at any depth: attributes, parts of short lists and dicts, what functions use.

    Functions hold what they enclose, are bound to, or have as defaults; those of the user also what they use by a
    global name, and methods count with their object. Lists that begin with data, and long lists and dicts, are not
    searched: these are samples. Nor is what belongs to this package other than datasets.

    :param in_loaders: whether to search what a ``DataLoader`` holds
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
    """Whether an object is of one of some classes, without asking a proxy for that of what it stands for."""
    return issubclass(type(item), kinds)


def is_generator(item: object) -> TypeGuard[RandomGenerator]:
    """Whether an object is a random generator."""
    return issubclass(type(item), _GENERATORS)


def parts_held(item: object) -> list[object]:
    """Return what an object holds itself, see :func:`reachable_from`."""
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
    if type(item).__module__.startswith("datasets."):  # whose order follows from its seed and set_epoch
        return [value for value in attributes_of(item).values() if not is_generator(value)]
    called = [item.func, item.args, item.keywords] if is_a(item, partial) else []
    return [*called, *attributes_of(item).values(), *_of_its_class(item)]


def attributes_of(item: object) -> dict[str, object]:
    """Return the attributes of an object by name, also those that its class declares as slots."""
    slots = [name for kind in type(item).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    found = {**{name: getattr(item, name) for name in slots if hasattr(item, name)}, **getattr(item, "__dict__", {})}
    return {name: value for name, value in found.items() if name != "_iterator"}  # of a DataLoader, with its workers


def _names(slots: str | Iterable[str]) -> list[str]:
    names = [slots] if isinstance(slots, str) else [*slots]
    return [name for name in names if not name.startswith("__")]


def _of_its_class(item: object) -> Iterator[object]:
    """Yield generators that are class attributes, and what else the user has defined in the class: also its methods."""
    for kind in type(item).__mro__:
        is_the_users = not is_of_library(kind.__module__)
        for value in vars(kind).values():
            if is_generator(value):
                yield value
            elif is_the_users:
                function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if is_a(function, FunctionType) or type(function).__module__ != "builtins":
                    yield function


def _used_by(function: FunctionType) -> Iterator[object]:
    """Yield what a function encloses, has as defaults and, if it is the user's, uses by a global name."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield function.__defaults__ or ()
    yield function.__kwdefaults__ or {}
    yield function.__dict__
    if not is_installed(function.__code__):
        names = {name for code in codes_in(function.__code__) for name in code.co_names}
        yield from (function.__globals__[name] for name in sorted(names & function.__globals__.keys()))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def is_installed(code: CodeType) -> bool:
    """Whether code belongs to Python, to an installed package or to this one, rather than to the user's program."""
    return _is_installed(code.co_filename)


@lru_cache(maxsize=4096)
def _is_installed(path: str) -> bool:
    return os.path.realpath(path).startswith((*LIBRARIES, _OWN_FILES)) or path.startswith("<frozen")


def distinct_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements that have memory of their own, as torch writes only to these; see ``expand``."""
    for dimension, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the sum over each tensor's elements, interpreted as integers: flipping any bit changes it."""
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.detach()
        if data.is_complex():
            data = torch.view_as_real(data)
        total = data.view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64)
        sums.append(total.to(sums[0].device) if sums else total)
    return torch.stack(sums).tolist() if sums else []  # a single read from the device


_CHUNK = 1 << 22  # elements


def sums_by_position(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a sum over each tensor that depends on where its elements are, too, unlike :func:`sums_of_bits`."""
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.detach()
        data = (torch.view_as_real(data) if data.is_complex() else data).contiguous().view(-1)
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for start in range(0, data.numel(), _CHUNK):
            part = data[start : start + _CHUNK].view(_INTEGERS[data.element_size()]).long()
            places = torch.arange(start, start + len(part), device=data.device)
            total += (part * (places * 0x5851F42D4C957F2D + 1)).sum()
        sums.append(total.to(sums[0].device) if sums else total)
    return torch.stack(sums).tolist() if sums else []  # a single read from the device


def accepts(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a function can be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # not written in Python
    return True
