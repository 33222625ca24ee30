"""Converting Python objects to nested plain values, which load without running code, and restoring them in place.

The contents of an object are followed through lists, dicts and the attributes of classes written in Python. Modules and
other objects with ``state_dict()`` give their states. Code is not data: functions and classes stay as they are in the
program, and so do objects that this package saves elsewhere.
"""

from __future__ import annotations

import copy
import enum
import functools
import hashlib
import logging
import random
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pytorch_accel_lite.checkpoint import fit_model_state, model_state
from pytorch_accel_lite.extension_tools.arguments_and_errors import is_in_this_package
from pytorch_accel_lite.extension_tools.data_and_batches import is_dense
from pytorch_accel_lite.extension_tools.plain_types import StateDict, Tree
from pytorch_accel_lite.extension_tools.random_numbers import RandomGenerator, restore_generator
from pytorch_accel_lite.extension_tools.states_and_files import full_state_dict
from pytorch_accel_lite.extensions.user_attributes.packed_lists import Columns, pack_columns, unpack_columns

#: A value of one of ``SCALARS``, or a tuple of the name of its kind and its parts.
Node: TypeAlias = Any
#: The program's object in the place of the restored one; ``NoPlaceError`` if there is none.
Current: TypeAlias = Any
#: Returns whether a tensor shares memory with something that a state keeps elsewhere, such as weights.
SharesMemory: TypeAlias = Callable[[torch.Tensor], bool]

if TYPE_CHECKING:
    from torchmetrics import Metric

SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SEQUENCES: dict[str, type] = {kind.__name__: kind for kind in (list, set, frozenset, deque)}
_DICTS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)}
_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (int, float, str, list, dict, set, bool, deque, Counter, OrderedDict)
}
_NUMBERS: dict[str, type] = {kind.__name__: kind for kind in (range, slice, torch.Size)}
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type, functools.partial,
    re.Pattern, logging.Logger, torch.dtype, torch.device, torch.layout, np.dtype, np.ufunc, types.GenericAlias,
    type(...),
)  # fmt: skip
#: Packages whose objects need not be saved, unless they have a ``state_dict()``.
_LIBRARIES = frozenset({"pytorch_accel_lite", "accelerate", "torch"})
#: The kinds of nodes that are not settings.
_DATA = ("tensor", "array", "columns", "generator", "state", "module")
_ARRAYS = "biufcSUmM"  # kinds of numpy types that are stored
_LONG = 64  # number of items from which columns are faster
_SMALL = 4096  # bytes: smaller arrays are stored as bytes, because a file has room for few separate arrays
_CHUNK = 1 << 22  # elements of a tensor on a device that are summed at once
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAME = ("same",)  # stands for the program's object in this place


class TooManyPartsError(Exception):
    """An object has more parts than the limit."""


class NoPlaceError(Exception):
    """A program does not have the object for a state."""


class Encoder:
    """Converts one object, with all its contents, into plain values.

    Args:
        is_saved: returns whether an object is saved elsewhere, and is therefore skipped
        most_parts: number of parts after which to raise ``TooManyPartsError``
        shares: returns whether a tensor shares memory with one that is saved elsewhere

    Attributes:
        unsaved: the paths to parts that cannot be stored, with their classes
    """

    def __init__(
        self,
        is_saved: Callable[[object], bool] = lambda value: False,
        most_parts: float = float("inf"),
        shares: SharesMemory = lambda tensor: False,
    ) -> None:
        self._shares = shares
        self.unsaved: dict[str, str] = {}
        self._is_saved = is_saved
        self._parts_left = most_parts
        self._numbers: dict[int, int] = {}
        self._held: list[object] = []  # keeps ids unique
        self._cells: list[list[Any]] = []  # the cells of nodes that hold tensors

    def encode(self, value: Tree, path: str) -> Node:
        """Return the value as a node.

        Args:
            path: name of the value in messages about parts that cannot be stored
        """
        self._parts_left -= 1
        if self._parts_left < 0:
            raise TooManyPartsError
        if type(value) in SCALARS:
            return value
        if id(value) in self._numbers:
            return "again", self._numbers[id(value)]
        if self._is_saved(value) or isinstance(value, _CODE):
            return SAME
        for encode in (_encode_number, self._encode_container, self._encode_tensor, self._encode_state):
            node = encode(value, path)
            if node is not None:
                return node
        return self._encode_object(value, path)

    def pack(self) -> None:
        """Replace small tensors by bytes: a file has room for few separate tensors. Tensors that share memory stay."""
        owners = Counter(tensor.untyped_storage().data_ptr() for [tensor] in self._cells if _has_memory(tensor))
        for cell in self._cells:
            [tensor] = cell
            if not _has_memory(tensor) or tensor.nbytes > _SMALL:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() == tensor.nbytes and owners[storage.data_ptr()] == 1:
                content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                cell[:] = [content, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

    def _note(self, value: object) -> int:
        self._held.append(value)
        return self._numbers.setdefault(id(value), len(self._numbers))

    def _note_unsaved(self, value: Tree, path: str) -> Node:
        self.unsaved[path] = type(value).__name__
        return SAME

    def _encode_container(self, value: Tree, path: str) -> Node:
        kind = type(value)
        if kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            items = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return ("tuple", items) if kind is tuple else ("named tuple", _name_of(kind), items)
        if _SEQUENCES.get(kind.__name__) is kind:
            if kind in (list, deque) and len(value) >= _LONG and (columns := pack_columns(value)) is not None:
                return "columns", self._note(value), kind.__name__, getattr(value, "maxlen", None), columns
            number = self._note(value)
            values = sorted(value, key=repr) if kind in (set, frozenset) else value
            items = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(values)]
            return kind.__name__, number, items, getattr(value, "maxlen", None)
        if _DICTS.get(kind.__name__) is kind:
            number = self._note(value)
            pairs = [
                (self.encode(key, f"{path}.keys()"), self.encode(v, f"{path}[{key!r}]")) for key, v in value.items()
            ]
            factory = getattr(getattr(value, "default_factory", None), "__name__", None)
            return kind.__name__, number, pairs, factory if factory in _FACTORIES else None
        return None

    def _encode_tensor(self, value: Tree, path: str) -> Node:
        if isinstance(value, torch.Tensor):
            full = full_state_dict(value.detach(), keep=True)
            flags = {"device": value.device.type, "grad": value.requires_grad, "parameter": type(value) is nn.Parameter}
            self._cells.append([full])
            node = "tensor", self._note(value), flags, self._cells[-1]
            return ("shared", node) if self._shares(value) else node
        if type(value) is np.ndarray and value.dtype.kind in _ARRAYS:
            number = self._note(value)
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            content = flat.tobytes() if flat.nbytes <= _SMALL else _as_tensor(flat)
            return "array", number, value.dtype.str, list(value.shape), content
        return None

    def _encode_state(self, value: Tree, path: str) -> Node:
        if (generator := _generator_state(value)) is not None:
            kind, state = generator
            return "generator", self._note(value), kind, self.encode(state, path)
        if isinstance(value, nn.Module):
            return self._encode_module(value, path)
        if isinstance(value, torch.utils.data.DataLoader):
            return SAME
        if callable(getattr(type(value), "state_dict", None)) and hasattr(value, "load_state_dict"):
            return "state", self._note(value), self.encode(value.state_dict(), f"{path}.state_dict()")
        return None

    def _encode_module(self, module: nn.Module, path: str) -> Node:
        tensors = [*module.parameters(), *module.buffers()]
        metrics = {name: part for name, part in module.named_modules() if _is_metric(part)}
        if not metrics and all(map(self._is_saved, tensors)):
            return SAME
        number = self._note(module)
        state = {
            name: value if isinstance(value, torch.Tensor) else self.encode(value, f"{path}.{name}")
            for name, value in model_state(module).items()
        }
        running = {
            name: self.encode({key: getattr(metric, key) for key in _states_of(metric)}, f"{path}.{name}")
            for name, metric in metrics.items()
        }
        return "module", number, state, running

    def _encode_object(self, value: Tree, path: str) -> Node:
        if isinstance(value, (enum.Enum, PurePath)):
            return self._encode_enum(value) if isinstance(value, enum.Enum) else ("path", str(value))
        if _is_trainer(value):
            return self._note_unsaved(value, path)
        if _is_of_known_library(type(value)) or isinstance(value, torch.utils.data.Dataset):
            return SAME
        if not has_only_attributes(type(value)):
            return self._note_unsaved(value, path)
        number = self._note(value)
        held = {name: self.encode(part, f"{path}.{name}") for name, part in vars(value).items()}
        return "object", number, _name_of(type(value)), held

    def _encode_enum(self, value: enum.Enum) -> Node:
        name = _name_of(type(value))
        return ("flag", name, value.value) if isinstance(value, enum.Flag) else ("enum", name, value.name)


class Decoder:
    """Restores objects from their nodes, in place if the program has an object of the same kind in that place.

    Args:
        device: where to create tensors that were not in host memory
        source: the origin of the nodes, for error messages
        shares: returns whether a tensor of the program shares memory with one that is saved elsewhere
    """

    def __init__(self, device: torch.device, source: str, shares: SharesMemory = lambda tensor: False) -> None:
        self._device = device
        self._source = source
        self._shares = shares
        self._objects: dict[int, object] = {}
        self._used: set[int] = set()
        self._copied: dict[int, object] = {}

    def decode(self, node: Node, current: Current) -> Any:
        """Return the object of a node: the current one, changed in place, or a new one.

        Args:
            current: the program's object in this place; ``NoPlaceError`` if there is none

        Raises:
            NoPlaceError: if the program lacks an object that only it can create
            ValueError: if the state of a module does not fit
        """
        if not isinstance(node, tuple):
            return node
        kind, *parts = node
        if kind == "same":
            if current is NoPlaceError:
                raise NoPlaceError
            return current
        if kind == "again":
            return self._objects[parts[0]]
        if kind in _SEQUENCES or kind in _DICTS:
            return (self._sequence if kind in _SEQUENCES else self._dict)(kind, current, *parts)
        return getattr(self, f"_{kind.replace(' ', '_')}")(current, *parts)

    def _target(self, number: int, current: Current, fits: bool, create: Callable[[], object]) -> Any:
        """Return the object to restore, registered before its parts are restored."""
        fits = fits and current is not NoPlaceError and id(current) not in self._used
        target = self._objects[number] = current if fits else create()
        self._used.add(id(target))
        return target

    def _must_exist(self, number: int, current: Current, fits: bool) -> Current:
        if not fits:
            raise NoPlaceError
        self._objects[number] = current
        return current

    def _sequence(self, kind: str, current: Current, number: int, nodes: list[Node], maxlen: int | None) -> object:
        cls = _SEQUENCES[kind]
        if kind == "frozenset":
            result = self._objects[number] = frozenset(self.decode(node, NoPlaceError) for node in nodes)
            return result
        options = {"maxlen": maxlen} if cls is deque else {}
        fits = type(current) is cls and getattr(current, "maxlen", None) == maxlen
        target = self._target(number, current, fits, lambda: cls(**options))
        held = [] if cls is set else [*target]
        values = [self.decode(node, held[i] if i < len(held) else NoPlaceError) for i, node in enumerate(nodes)]
        target.clear()
        (target.update if cls is set else target.extend)(values)
        return target

    def _columns(self, current: Current, number: int, kind: str, maxlen: int | None, columns: Columns) -> object:
        options = {"maxlen": maxlen} if kind == "deque" else {}
        cls = _SEQUENCES[kind]
        fits = type(current) is cls and getattr(current, "maxlen", None) == maxlen
        target = self._target(number, current, fits, lambda: cls(**options))
        items = unpack_columns(
            columns, lambda device: self._device if device == self._device.type else "cpu", _find_class
        )
        target.clear()
        target.extend(items)
        return target

    def _dict(
        self, kind: str, current: Current, number: int, pairs: list[tuple[Node, Node]], factory: str | None
    ) -> object:
        cls = _DICTS[kind]
        target = self._target(number, current, type(current) is cls, cls)
        held = {self.decode(key, NoPlaceError): node for key, node in pairs}
        make = getattr(target, "default_factory", None) or (lambda: NoPlaceError)  # of the program
        values = {key: self.decode(node, target[key] if key in target else make()) for key, node in held.items()}
        target.clear()
        target.update(values)
        if factory is not None:
            target.default_factory = _FACTORIES[factory]
        return target

    def _tuple(self, current: Current, nodes: list[Node]) -> tuple[object, ...]:
        held = current if isinstance(current, tuple) else ()
        return tuple(self.decode(node, held[i] if i < len(held) else NoPlaceError) for i, node in enumerate(nodes))

    def _named_tuple(self, current: Current, name: str, nodes: list[Node]) -> tuple[object, ...]:
        values = self._tuple(current, nodes)
        cls = type(current) if _name_of(type(current)) == name else _find_class(name)
        if not issubclass(cls, tuple):
            raise NoPlaceError
        return tuple.__new__(cls, values)

    def _shared(self, current: Current, node: Node) -> torch.Tensor:
        if not (isinstance(current, torch.Tensor) and self._shares(current)):
            return self._tensor(current, *node[1:])
        self._objects[node[1]] = current  # its values have been restored elsewhere
        return current

    def _tensor(self, current: Current, number: int, flags: StateDict, cell: list[Any]) -> torch.Tensor:
        device = self._device if flags["device"] == self._device.type else torch.device("cpu")
        saved = cell[0] if len(cell) == 1 else _unpack(*cell)

        def create() -> torch.Tensor:
            tensor = copy.deepcopy(saved, self._copied).to(device)  # views of one tensor stay views of one
            return nn.Parameter(tensor, flags["grad"]) if flags["parameter"] else tensor

        fits = _can_be_filled(current, saved, flags["device"]) and not self._shares(current)
        target: torch.Tensor = self._target(number, current, fits, create)
        if target is current:
            with torch.no_grad():
                target.copy_(saved)
        if (
            target.is_leaf
            and target.requires_grad != flags["grad"]
            and (target.is_floating_point() or not flags["grad"])
        ):
            target.requires_grad_(flags["grad"])
        return target

    def _array(
        self, current: Current, number: int, dtype: str, shape: list[int], content: bytes | torch.Tensor
    ) -> npt.NDArray[Any]:
        data = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content.numpy()
        saved = data.view(np.dtype(dtype)).reshape(shape)
        fits = type(current) is np.ndarray and (current.dtype, current.shape) == (saved.dtype, saved.shape)
        target: npt.NDArray[Any] = self._target(number, current, fits and current.flags.writeable, saved.copy)
        if target is current:
            target[...] = saved
        return target

    def _generator(self, current: Current, number: int, kind: str, node: Node) -> object:
        state = self.decode(node, NoPlaceError)
        fits = current is not NoPlaceError and (_generator_state(current) or ("",))[0] == kind
        target = self._target(number, current, fits, lambda: _create_generator(kind))
        restore_generator(target, state)
        return target

    def _state(self, current: Current, number: int, node: Node) -> object:
        owner = self._must_exist(number, current, hasattr(current, "load_state_dict"))
        owner.load_state_dict(self.decode(node, NoPlaceError))
        return owner

    def _module(self, current: Current, number: int, nodes: dict[str, Node], running: dict[str, Node]) -> nn.Module:
        module: nn.Module = self._must_exist(number, current, isinstance(current, nn.Module))
        state = {name: self.decode(node, NoPlaceError) for name, node in nodes.items()}
        module.load_state_dict(fit_model_state(module, state, self._source))
        metrics = dict(module.named_modules())
        for name, node in running.items():
            for key, value in self.decode(node, {}).items():
                setattr(metrics[name], key, value)
            metrics[name]._computed = None  # noqa: SLF001
        return module

    def _enum(self, current: Current, name: str, member: str) -> object:
        cls = type(current) if _name_of(type(current)) == name else _find_class(name)
        members: Mapping[str, object] = getattr(cls, "__members__", {}) if issubclass(cls, enum.Enum) else {}
        if member not in members:
            raise NoPlaceError
        return members[member]

    def _flag(self, current: Current, name: str, value: int) -> object:
        cls = type(current) if _name_of(type(current)) == name else _find_class(name)
        if not issubclass(cls, enum.Flag):
            raise NoPlaceError
        try:
            return cls(value)
        except ValueError:  # the program no longer has one of its members
            raise NoPlaceError from None

    def _path(self, current: Current, text: str) -> PurePath:
        return current if isinstance(current, PurePath) and str(current) == text else Path(text)

    def _number(self, current: Current, dtype: str, content: bytes) -> np.generic:
        number: np.generic = np.frombuffer(content, np.dtype(dtype))[0]
        return number

    def _numbers(self, current: Current, name: str, arguments: list[Any]) -> object:
        return _NUMBERS[name](*arguments)

    def _object(self, current: Current, number: int, name: str, held: dict[str, Node]) -> object:
        fits = current is not NoPlaceError and _name_of(type(current)) == name
        target = self._target(number, current, fits, lambda: object.__new__(_find_class(name)))
        attributes = vars(target)
        values = {key: self.decode(node, attributes.get(key, NoPlaceError)) for key, node in held.items()}
        attributes.clear()
        attributes.update(values)
        return target


def digest(node: Node) -> str | None:
    """Return a digest of all values in a node; ``None`` if it has tensors without memory of their own."""
    text = hashlib.sha256()
    on_devices: list[torch.Tensor] = []

    def add(value: Node) -> None:
        if isinstance(value, torch.Tensor):
            text.update(f"{value.dtype}{tuple(value.shape)}".encode())
            if value.device.type == "cpu":
                text.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            else:
                on_devices.append(value)
        elif isinstance(value, (tuple, list)):
            text.update(f"{type(value).__name__}{len(value)}".encode())
            for item in value:
                add(item)
        elif isinstance(value, dict):
            add([*value.items()])
        else:
            text.update(f"{type(value).__name__}{value!r};".encode())

    if not all(map(is_dense, tensors_of_node(node))):
        return None
    add(node)
    text.update(repr(_sums_by_position(on_devices)).encode())
    return text.hexdigest()


def _sums_by_position(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a sum over each tensor that depends on the bits of its elements and on their positions."""
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


def tensors_of_node(node: Node) -> Iterable[torch.Tensor]:
    """Yield the tensors in a node."""
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, (tuple, list, dict)):
        for item in node.values() if isinstance(node, dict) else node:
            yield from tensors_of_node(item)


def bytes_of_node(node: Node) -> int:
    """Return the size of the tensors in a node; of sparse ones, of their values."""
    return sum(
        tensor.nbytes if tensor.layout is torch.strided else tensor._nnz() * tensor.element_size()  # noqa: SLF001
        for tensor in tensors_of_node(node)
    )


def holds_nothing(node: Node) -> bool:
    """Whether all parts of a node equal the program's objects in their places."""
    if node == SAME:
        return True
    if not isinstance(node, tuple) or node[0] not in ("tuple", *_SEQUENCES, *_DICTS):
        return False
    items = node[1] if node[0] == "tuple" else node[2]
    values = [value for _, value in items] if node[0] in _DICTS else items
    return bool(values) and all(map(holds_nothing, values))


def is_setting(node: Node) -> bool:
    """Whether a node holds only settings, such as numbers and texts, and no data that may have been drawn at random."""
    if isinstance(node, tuple) and node and node[0] in _DATA:
        return False
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, (tuple, list)) else ()
    return all(map(is_setting, parts))


def _has_memory(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and is_dense(tensor)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and not tensor.is_neg()
    )


def _unpack(content: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).reshape(shape)


def _is_metric(module: nn.Module) -> bool:
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", ())  # no metrics without this import
    return isinstance(module, metric)


def _states_of(metric: Metric) -> list[str]:
    """Return the names of a metric's running values, which are not in its ``state_dict()``."""
    return [*metric.metric_state, "_update_count"]


def _encode_number(value: Tree, path: str) -> Node:
    if isinstance(value, np.generic):
        return "number", value.dtype.str, value.tobytes()
    if isinstance(value, (range, slice)):
        return "numbers", type(value).__name__, [value.start, value.stop, value.step]
    return ("numbers", "Size", [[*value]]) if isinstance(value, torch.Size) else None


def _as_tensor(flat: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


def _can_be_filled(current: Current, saved: torch.Tensor, device: str) -> bool:
    """Whether a tensor of the program can take the values of a saved one."""
    return (
        isinstance(current, torch.Tensor)
        and not current.is_inference()
        and current.layout is saved.layout
        and (current.shape, current.dtype, current.device.type) == (saved.shape, saved.dtype, device)
        and 0 not in (stride for size, stride in zip(current.shape, _strides(current), strict=True) if size > 1)
    )


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else (1,) * tensor.ndim


def _generator_state(value: object) -> tuple[str, object] | None:
    """Return the kind and the state of a random generator; ``None`` for anything else."""
    if isinstance(value, torch.Generator):
        return f"torch {value.device.type}", value.get_state()
    if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in _BIT_GENERATORS:
        return f"numpy {type(value.bit_generator).__name__}", value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return "numpy", value.get_state()
    return ("python", value.getstate()) if type(value) is random.Random else None


def _create_generator(kind: str) -> RandomGenerator:
    library, _, name = kind.partition(" ")
    if library == "torch":
        return torch.Generator(name)
    if library == "numpy":
        is_new = name in _BIT_GENERATORS
        return np.random.Generator(getattr(np.random, name)()) if is_new else np.random.RandomState()
    return random.Random()


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_of_known_library(kind: type) -> bool:
    """Whether objects of a class need not be saved. Distributions of torch have parameters that a run may change."""
    return _package(kind) in _LIBRARIES and not kind.__module__.startswith("torch.distributions")


def _is_trainer(value: object) -> bool:
    """Whether an object is a trainer: another one than that of the run, which is saved elsewhere."""
    return callable(getattr(type(value), "calculate_train_batch_loss", None))


def has_only_attributes(kind: type) -> bool:
    """Whether instances of a class hold only attributes: it is written in Python, and is not one of Python's own."""
    bases = [vars(base) for base in kind.__mro__ if base is not object]
    special = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
    return (
        all(getattr(kind, name, None) is getattr(object, name, None) for name in special)
        and not any(base.get("__slots__") or "__del__" in base for base in bases)
        and (_package(kind) not in sys.stdlib_module_names or kind.__module__ == "__main__" or _is_namespace(kind))
        and kind.__dictoffset__ != 0
    )


def _is_namespace(kind: type) -> bool:
    return (kind.__module__, kind.__qualname__) == ("argparse", "Namespace")


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_class(name: str) -> type:
    """Return a class that the program has imported, if an instance can be created without running its code.

    Raises:
        NoPlaceError: if there is no such class
    """
    module, _, path = name.partition(":")
    modules = [module]
    if is_in_this_package(module):  # in another version, a class of this package may be in another file
        modules += [other for other in sys.modules if is_in_this_package(other)]
    for each in modules:
        found: Any = sys.modules.get(each)
        for part in path.split("."):
            found = getattr(found, "__dict__", {}).get(part)
        if not isinstance(found, type) or _name_of(found) not in (name, f"{each}:{path}"):
            continue
        if has_only_attributes(found) or issubclass(found, (enum.Enum, tuple)):
            return found
    raise NoPlaceError
