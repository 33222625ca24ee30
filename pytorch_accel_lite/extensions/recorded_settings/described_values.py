"""Settings as texts that are equal for equal values, in any process."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from types import CodeType
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pytorch_accel_lite.extension_tools.arguments_and_errors import may_differ
from pytorch_accel_lite.extension_tools.data_and_batches import is_dense
from pytorch_accel_lite.extension_tools.modules_and_devices import class_of, unsharded_class
from pytorch_accel_lite.extension_tools.texts_and_pages import short_repr

#: Marks the code of a function: the Python version of the bytecode, and a checksum.
CODE = re.compile(r" #(\d+\.\d+)-[0-9a-f]{8}")
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})
_DEEPEST = 4


def describe_setting(value: object, name: str = "", depth: int = 0) -> str:
    """Return a text that is equal for equal settings, in any process; secrets are hidden.

    Args:
        name: name of the setting, which shows whether it is a secret
    """
    if isinstance(value, (bool, int, float, complex, type(None), np.generic)):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, (str, bytes)):
        text = short_repr(value, name)
        return text if len(value) < 50 else f"{text} ({crc32(repr(value).encode()):08x})"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _array(value)
    if isinstance(value, type):
        return class_name(value)
    if depth >= _DEEPEST:
        return f"{type(value).__name__}(...)"
    if isinstance(value, (Mapping, list, tuple, set, frozenset, range)):
        return _container(value, depth + 1)
    if isinstance(value, partial):
        args = [describe_setting(item, "", depth + 1) for item in value.args]
        args += [f"{key}={describe_setting(item, key, depth + 1)}" for key, item in value.keywords.items()]
        return f"{describe_setting(value.func, '', depth + 1)}({', '.join(args)})"
    return _function(value, depth + 1) if inspect.isroutine(value) else describe_object(value, depth + 1)


def class_name(kind: type) -> str:
    """Return the name of a class, without the name of a function that defines it."""
    return unsharded_class(kind).__name__


def _array(value: torch.Tensor | npt.NDArray[Any]) -> str:
    if isinstance(value, torch.Tensor):
        if not is_dense(value) or hasattr(value, "device_mesh"):
            return f"tensor{tuple(value.shape)}"
        value = value.detach().to("cpu", torch.float64 if value.is_floating_point() else None).numpy()
    if value.size == 1:
        return repr(value.item())
    return f"array{value.shape} ({crc32(np.ascontiguousarray(value).tobytes()):08x})"


def _container(value: Collection[object], depth: int) -> str:
    if isinstance(value, range):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {describe_setting(item, str(key), depth)}' for key, item in value.items())}}}"
    items = [describe_setting(item, "", depth) for item in [*value][:1000]]
    items = sorted(items) if isinstance(value, (set, frozenset)) else items
    text = ", ".join(items)
    return f"[{text}]" if len(value) < 20 else f"[{len(value)} items] ({crc32(text.encode()):08x})"


def describe_object(value: object, depth: int) -> str:
    """Describe an object by its class and the attributes that are arguments of the class."""
    kind = class_of(value) if isinstance(value, nn.Module) else type(value)
    if isinstance(value, nn.Module):
        own = {**vars(value), **{name: item for name, item in value._buffers.items() if item is not None}}
    else:
        text = "" if kind.__repr__ is object.__repr__ else repr(value)
        if text and " at 0x" not in text and len(text) < 1000 and "\n" not in text:
            return text
        own = getattr(value, "__dict__", {})
    taken = parameter_names(kind)  # type: ignore[arg-type]
    names = [name for name in own if name in taken and not may_differ(name)]
    parts = [f"{name}={describe_setting(own[name], name, depth)}" for name in sorted(names)]
    return f"{kind.__name__}({', '.join(parts)})"


@lru_cache(maxsize=1000)
def parameter_names(kind: type) -> set[str]:
    """Return the names of the arguments of a class, if they are known."""
    try:
        return set(inspect.signature(kind).parameters)
    except (TypeError, ValueError):  # the class is not written in Python
        return set()


def _function(value: Callable[..., object], depth: int) -> str:
    """Describe a function by its name and, if it is the user's, by its code and its captured variables."""
    function: Any = getattr(value, "__func__", value)
    name = getattr(function, "__name__", type(value).__name__)
    code = getattr(function, "__code__", None)
    if code is None or os.path.realpath(code.co_filename).startswith(_LIBRARIES):
        return name
    around = []
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            around.append(f"{variable}={describe_setting(cell.cell_contents, variable, depth)}")
        except ValueError:  # the variable is not assigned yet
            continue
    defaults = [describe_setting(item, "", depth) for item in function.__defaults__ or ()]
    number = crc32(repr([_code(code), defaults]).encode())
    version = ".".join(map(str, sys.version_info[:2]))
    arguments = f"({', '.join(around)})" if around else ""
    return f"{name}{arguments} #{version}-{number:08x}"


def _code(code: CodeType) -> list[object]:
    constants = [_code(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
    return [code.co_code, constants, code.co_names]
