"""The contents of objects at any depth, and the random generators among them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TypeAlias, TypeGuard, TypeVar, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pytorch_accel_lite.base.user_code import is_in_this_package, is_installed, users_classes

T = TypeVar("T")

#: A random generator, of a kind that objects may hold.
RandomGenerator: TypeAlias = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_GENERATORS = get_args(RandomGenerator)
#: Types that are never searched.
_DATA = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic)
_MOST_REACHED = 10_000  # objects
_MOST_PARTS = 1000  # parts of a list or dict
_FIRST_PARTS = 8  # of a list or dict, which tell whether it holds data


def reachable_from(roots: Iterable[object], in_loaders: bool = False) -> list[object]:
    """Return objects and their contents at any depth: attributes, short lists and dicts, and what functions use.

    Functions hold the objects that they enclose, are bound to, or have as defaults; user functions also hold the
    globals that they use, and methods hold their object. Lists that begin with data, and long lists and dicts, are not
    searched: they hold samples. Nor are objects of this package, except datasets. Of very many objects, the nearest are
    returned.

    Args:
        in_loaders: whether to search the contents of a ``DataLoader``
    """
    excluded = (*_DATA, ModuleType, type) if in_loaders else (*_DATA, ModuleType, type, DataLoader)
    roots = [*roots]
    reached = _search(roots, excluded, nearest_first=False)
    return reached if len(reached) < _MOST_REACHED else _search(roots, excluded, nearest_first=True)


def _search(roots: list[object], excluded: tuple[type, ...], nearest_first: bool) -> list[object]:
    """Return the objects that can be reached, up to a limit. Usually, the order does not matter, but must stay."""
    reached: dict[int, object] = {}
    left = deque(roots)
    while left and len(reached) < _MOST_REACHED:
        item = left.popleft() if nearest_first else left.pop()
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
        return [] if len(item) > _MOST_PARTS or _is_data(item) else [*item]
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


def _is_data(item: object, depth: int = 3) -> bool:
    """Whether an object is data, or a list or dict whose first parts are, such as a sample or a list of samples."""
    if is_a(item, list, tuple, dict):
        parts = islice(item.values() if is_a(item, dict) else item, _FIRST_PARTS)
        return depth == 0 or all(_is_data(part, depth - 1) for part in parts)
    return is_a(item, *_DATA)


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
    if not is_installed(function.__code__.co_filename):
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

    Lists that begin with data, and long lists and dicts of other things, are not searched: they hold samples.
    """
    nested = [root]
    seen = {id(root)}
    for item in nested:  # grows in the loop
        left = [*getattr(item, "__dict__", {}).values()]
        while left:
            part = left.pop(0)
            if is_kind(part):
                nested += [] if id(part) in seen else [part]
                seen.add(id(part))
            elif isinstance(part, (list, tuple, dict)) and id(part) not in seen:
                seen.add(id(part))
                parts = [*part.values()] if isinstance(part, dict) else part
                is_searched = len(parts) <= _MOST_PARTS or is_kind(parts[0])
                left[:0] = parts if is_searched and not _is_data(part) else []
    return nested
