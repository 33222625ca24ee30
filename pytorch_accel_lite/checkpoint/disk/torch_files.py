"""Files of ``torch.save``: plain values and tensors, which are read without running code."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytorch_accel_lite.base.types import Keys, Tree
from pytorch_accel_lite.checkpoint.disk.atomic_files import naming_file

# Needed to load numpy numbers, but not allowed by torch by default. They run no code from a file.
_NUMPY_NUMBERS: list[Any] = [
    np.dtype,
    (np.float64().__reduce__()[0], "numpy.core.multiarray.scalar"),  # written by numpy 1
    (np.float64().__reduce__()[0], "numpy._core.multiarray.scalar"),
    *{type(np.dtype(code)) for code in "?bhilqBHILQefd"},
]

_PLAIN = frozenset({str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size})

#: What makes a plain value of one of a subclass, such as an enum, whatever the subclass's own conversions return.
_TO_PLAIN: dict[type, Callable[..., Tree]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    bytes: lambda value: bytes(memoryview(value)),
}
#: Whether the tensors of a class can be loaded without running code, as far as that has been tried.
_LOADS: dict[type, bool] = {}


def storable(value: Tree, path: str) -> Tree:
    """Convert a value to types that ``torch.load(weights_only=True)`` can load.

    Numbers of numpy become Python numbers, and values of subclasses of plain types, such as enums, plain ones.

    Args:
        path: name of the value in the error

    Raises:
        TypeError: if the value, or one nested in it, cannot be converted; names the path to it
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor) and (tensor := _loadable_tensor(value)) is not None:
        return tensor
    if isinstance(value, np.generic) and type(item := value.item()) is not kind:  # unlike a longdouble
        return storable(item, path)
    if isinstance(value, Mapping):
        converted = {storable(k, f"{path}.keys()"): storable(v, f"{path}[{k!r}]") for k, v in value.items()}
        ordered_or_counter = next((base for base in (OrderedDict, Counter) if isinstance(value, base)), None)
        return converted if ordered_or_counter is None else ordered_or_counter(converted)
    if kind in (list, tuple, set):
        return kind(storable(item, f"{path}[{i}]") for i, item in enumerate(value))
    for base, to_plain in _TO_PLAIN.items():
        if isinstance(value, base):
            return to_plain(value)
    raise TypeError(
        f"{path} is {type(value).__name__}, which cannot be stored without pickle. Store numbers, strings, tensors, "
        "and lists, tuples, sets or dicts of them."
    )


def _loadable_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that loads without running code: without attributes that do not; ``None`` if there is none."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter) and not tensor.is_nested:
        if not vars(tensor) or _loads(vars(tensor)):
            return tensor
        plain = tensor.detach()
        return torch.nn.Parameter(plain, tensor.requires_grad) if kind is torch.nn.Parameter else plain
    # Shards are written to other files. Packages such as torchao tell torch which of their classes are safe.
    if hasattr(tensor, "full_tensor"):
        return tensor
    # A class that loads is not tried again, which would wait for the device, unless an attribute does not load.
    others = {name: item for name, item in vars(tensor).items() if not isinstance(item, torch.Tensor)}
    if not (_LOADS.get(kind) and (not others or _loads(others))):
        _LOADS[kind] = _loads(tensor)
    return tensor if _LOADS[kind] else None


def _loads(value: object) -> bool:
    """Whether what torch writes of a value can be loaded without running code."""
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        load_plain(content)
    except Exception:  # torch raises almost anything
        return False
    return True


def map_nested(
    function: Callable[[Keys, Tree], Tree],
    value: Tree,
    path: Keys = (),
    is_leaf: Callable[[object], bool] = lambda value: False,
) -> Tree:
    """Apply a function to the values in nested dicts, lists and tuples, as ``storable()`` returns them.

    It is like torch's ``tree_map_with_path``, at a fraction of the cost.

    Args:
        function: takes the keys and indices that lead to a value, and the value
        is_leaf: whether a dict counts as a value
    """
    if isinstance(value, dict) and not is_leaf(value):
        items = {key: map_nested(function, item, (*path, key), is_leaf) for key, item in value.items()}
        return type(value)(items) if isinstance(value, (OrderedDict, Counter)) else items
    if type(value) in (list, tuple):
        return type(value)([map_nested(function, item, (*path, index), is_leaf) for index, item in enumerate(value)])
    return function(path, value)


def write_plain(value: Tree, path: Path) -> None:
    """Write a value to be loaded with ``load_plain()``, without syncing the file."""
    with naming_file(path), open(path, "wb") as file:
        torch.save(value, file)


def load_plain(path: Path | io.BytesIO, mapped: bool = False, name: str | None = None) -> Tree:
    """Load a file written by ``torch.save`` onto the CPU, without running code from the file.

    Args:
        mapped: whether to leave the tensors in the file until they are used
        name: name of the file in the error, instead of its path

    Raises:
        ValueError: if the file cannot be loaded without running code
    """
    try:
        with torch.serialization.safe_globals(_NUMPY_NUMBERS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged file makes torch raise almost anything
        raise ValueError(
            f"The file {name or str(path)!r} cannot be loaded as plain tensors and values: it is damaged, or holds "
            f"objects that cannot be rebuilt without running code ({type(error).__name__})."
        ) from error
