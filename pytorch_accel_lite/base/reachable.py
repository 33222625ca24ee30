"""The contents of objects at any depth: finding generators among them, and noticing changes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeGuard, TypeVar, get_args
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from pytorch_accel_lite.base.origins import is_in_this_package, is_installed, users_classes

T = TypeVar("T")

#: A random generator, of a kind that objects may hold.
RandomGenerator: TypeAlias = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_GENERATORS = get_args(RandomGenerator)
#: Types that are never searched.
_DATA = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic)
_MOST_REACHED = 10_000  # objects
_MOST_PARTS = 1000  # parts of a list or dict

#: The result of ``marks_of()``: numbers and types, without references to data.
Marks: TypeAlias = list[object]

#: A list, tuple, set, dict or array of objects.
_Elements: TypeAlias = Any

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
#: Types that are compared, but not searched.
_LEAVES = (ModuleType, type, torch.Tensor, np.ndarray, np.generic, DataLoader)
_SHORT = 1000  # elements, as many as parts_held searches in a list or dict
_MOST_OBJECTS = 10_000
_MOST_PLAIN = 1 << 17  # elements of a list of numbers or names that are all compared
_MOST_OTHERS = 1 << 13  # elements of other lists and of dicts
_PART = 16  # of a longer list, a 16th of the limit is compared
_MOST_BYTES = 1 << 24  # bytes of an array that are all compared
_PIECES, _PIECE = 1 << 10, 1 << 12  # pieces of a larger array that are compared, and bytes of a piece


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
    slots = [name for kind in type(item).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    found = {**{name: getattr(item, name) for name in slots if hasattr(item, name)}, **getattr(item, "__dict__", {})}
    return {name: value for name, value in found.items() if name != "_iterator"}  # a DataLoader's, with its workers


def _names(slots: str | Iterable[str]) -> list[str]:
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


def marks_of(roots: Iterable[object]) -> Marks:
    """Return marks that differ if objects, or their contents, have changed; reads nothing from a device.

    Marks cover the attributes of objects at any depth, and the objects that functions use: numbers, names, the shapes,
    versions and addresses of tensors, the contents of arrays, and elements of lists and dicts. Very long lists and
    large arrays are compared only in part.
    """
    marks: Marks = []
    seen: dict[int, object] = {}
    left = [*roots]
    while left and len(seen) < _MOST_OBJECTS:
        item = left.pop()
        if is_a(item, *_PLAIN):
            marks.append(hash(item))
        elif id(item) not in seen:
            seen[id(item)] = item
            marks.append(type(item))
            marks += _own_marks(item)
            left += [] if is_a(item, *_LEAVES) else parts_held(item)
    return marks


def _own_marks(item: object) -> Iterator[object]:
    """Yield marks of an object itself, without those of its ``parts_held``."""
    if is_a(item, torch.Tensor):
        yield _mark_of_tensor(item)
    elif is_a(item, np.ndarray, np.generic):
        yield _mark_of_array(np.asarray(item))
    elif is_a(item, ModuleType, type):
        yield id(item)
    elif is_a(item, dict) and len(item) <= _SHORT:
        yield from map(hash, item)
    elif is_a(item, list, tuple, dict, set, frozenset):
        yield id(item) if len(item) > _SHORT else None
        yield _mark_of_elements(item)
    elif hasattr(type(item), "iloc"):
        yield from _marks_of_table(item)


def _marks_of_table(table: Any) -> Iterator[object]:
    """Yield marks of the columns of a data frame, or of a series."""
    columns = [table] if len(table.shape) == 1 else [table.iloc[:, number] for number in range(table.shape[1])]
    yield table.shape
    for column in columns[:_SHORT]:
        yield _mark_of_array(column.to_numpy(), compares_address=False)


def _mark_of_tensor(tensor: torch.Tensor) -> object:
    shape = () if tensor.is_nested else tuple(tensor.shape)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.dtype, shape, _version_of(tensor)
    if tensor.is_shared():  # type: ignore[no-untyped-call]
        return tensor.dtype, shape, tensor.data_ptr()  # workers see changes that are made in place
    few = tensor.detach().reshape(-1)[:: max(tensor.numel() // _PIECES, 1)]  # NumPy arrays may change it
    return (
        tensor.dtype,
        shape,
        _version_of(tensor),
        tensor.data_ptr(),
        crc32(few.contiguous().view(torch.uint8).numpy().tobytes()),
    )


def _version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been changed in place, which tensors made in inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _mark_of_array(array: npt.NDArray[Any], compares_address: bool = True) -> object:
    address = array.__array_interface__["data"][0] if compares_address else None
    if array.dtype == object:
        return array.shape, address, _mark_of_elements(array.reshape(-1))
    if not array.flags.writeable or isinstance(array, np.memmap) or isinstance(array.base, np.memmap):
        return array.dtype.str, array.shape, address  # the array is in a file, which workers read themselves
    if array.nbytes <= _MOST_BYTES:
        return array.dtype.str, array.shape, address, crc32(np.ascontiguousarray(array).view(np.uint8).data)
    rows = array.reshape(-1) if array.flags.c_contiguous else array
    step, count = max(len(rows) // _PIECES, 1), max(_PIECE * len(rows) // array.nbytes, 1)
    number = 0
    for begin in range(0, len(rows), step):
        number = crc32(np.ascontiguousarray(rows[begin : begin + count]).tobytes(), number)
    return array.dtype.str, array.shape, address, number


def _mark_of_elements(elements: _Elements) -> int:
    """Return a hash of the elements of a list, dict, set or array of objects; of very many, only some count."""
    length = len(elements)
    if isinstance(elements, (set, frozenset)):
        return hash((length, frozenset(elements) if length <= _MOST_PLAIN else None))
    if isinstance(elements, dict):
        elements = [*elements.items()]
    few = _some_of(elements, _MOST_PLAIN)
    if {*map(type, few)} <= {*_PLAIN}:
        return hash((length, tuple(few)))
    few = _some_of(elements, _MOST_OTHERS)
    return hash((length, *(_mark_of_element(element, depth=3) for element in few)))


def _some_of(elements: Sequence[object] | npt.NDArray[Any], most: int) -> Sequence[object] | npt.NDArray[Any]:
    return elements if len(elements) <= most else elements[:: -(-len(elements) * _PART // most)]


def _mark_of_element(element: object, depth: int) -> int:
    if is_a(element, *_PLAIN):
        return hash(element)
    if is_a(element, torch.Tensor):
        return hash((id(element), _version_of(element)))
    if is_a(element, np.ndarray):
        few = element.reshape(-1)[:: max(element.size // _PIECES, 1)]
        return hash((id(element), few.tobytes() if element.dtype != object and element.flags.writeable else None))
    if depth and is_a(element, list, tuple, dict):
        parts = chain(element, element.values()) if is_a(element, dict) else iter(element)
        return hash((len(element), *(_mark_of_element(part, depth - 1) for part in islice(parts, _SHORT))))
    held = getattr(element, "__dict__", None)
    return hash((id(element), _mark_of_element(held, depth - 1) if depth and held else 0))
