"""Whose attributes are kept, and which: those of trainers, callbacks and modules, except the package's own."""

from __future__ import annotations

import time
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    is_from_this_package,
    library_attributes,
    users_classes,
)
from pytorch_accel_lite.extension_tools.data_and_batches import is_dense, parts_in
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import named_callbacks
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import is_created, unwrapped_parts
from pytorch_accel_lite.extension_tools.random_numbers import is_generator
from pytorch_accel_lite.extension_tools.states_and_files import SavedBeside, unsaved_attribute_names
from pytorch_accel_lite.extensions.user_attributes.plain_objects import (
    SCALARS,
    Encoder,
    SharesMemory,
    TooManyPartsError,
    bytes_of_node,
    digest,
    has_only_attributes,
    holds_nothing,
)

#: The names of an owner and of one of its attributes.
Key = tuple[str, str]

_RECENT = 30 * 24 * 3600  # seconds


def attributes_of_users(trainer: TrainerLike, trained: Collection[str]) -> Iterator[tuple[Key, object]]:
    """Yield the users' attributes, except points in time and attributes that are saved with the trainer.

    Args:
        trained: the names of trained objects
    """
    now = time.time()
    for owner_name, owner in owners_of_attributes(trainer).items():
        library = _library_names(owner) | unsaved_attribute_names(owner)
        for name, value in [*vars(owner).items()]:
            is_instant = type(value) is float and now - _RECENT < value <= now
            if name not in library and not is_instant and (owner_name or name not in trained):
                yield (owner_name, name), value


def owners_of_attributes(trainer: TrainerLike) -> dict[str, TrainerLike | TrainerCallback]:
    """Return the owners of kept attributes, by name: the trainer, and callbacks without a state of their own."""
    if not trainer.saves_attributes:
        return {}
    callbacks = {
        name: callback
        for name, callback in named_callbacks(trainer.callback_handler).items()
        if not is_from_this_package(type(callback)) and callback.saves_attributes and not _has_own_state(callback)
    }
    return {"": trainer, **callbacks}


def _has_own_state(callback: TrainerCallback) -> bool:
    method = getattr(type(callback), "state_dict", None) or getattr(callback, "state_dict", None)
    return method is not None and not is_from_this_package(method)


def _library_names(owner: TrainerLike | TrainerCallback) -> set[str]:
    """Return the names of the package's own attributes, which its classes have or its constructors set."""
    ours = [kind for kind in type(owner).__mro__ if is_from_this_package(kind)]
    if isinstance(owner, TrainerCallback):
        ours_has = set(chain.from_iterable(map(vars, ours)))
        if ours != [TrainerCallback]:  # a built-in base class may create private attributes later
            ours_has |= {name for name in vars(owner) if name.startswith("_")}
        return ours_has | library_attributes(owner)
    return library_attributes(owner)


def saved_elsewhere(trainer: TrainerLike, beside: SavedBeside) -> Callable[[object], bool]:
    """Return whether an object is saved elsewhere in a training state, or is a part of the run."""
    optimizer = trainer.optimizer
    roots: list[object] = [trainer.model, trainer.get_model(), trainer.loss_func]
    roots += [*beside.trained.values(), *beside.loose.values(), *beside.registered.values()]
    modules = [root for root in roots if isinstance(root, nn.Module)]
    objects = [
        trainer, trainer.accelerator, trainer.callback_handler, trainer.run_history, trainer.current_run, optimizer,
        getattr(optimizer, "optimizer", None), trainer.scheduler, trainer.train_dataset, trainer.eval_dataset,
        *trainer.callback_handler, *roots,
    ]  # fmt: skip
    objects += [getattr(trainer.train_dataloader, name, None) for name in ("sampler", "batch_sampler")]
    for module in modules:
        objects += [*module.modules(), *module.parameters(), *module.buffers()]
    ids = {id(thing): thing for thing in objects if thing is not None}
    return lambda value: id(value) in ids


def sharing_memory(trainer: TrainerLike, beside: SavedBeside) -> SharesMemory:
    """Return whether a tensor shares memory with weights or with the data, and must not be changed in place."""
    owners = [trainer.get_model(), trainer.loss_func, *beside.trained.values(), *beside.loose.values()]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    tensors: list[object] = [owner for owner in owners if isinstance(owner, torch.Tensor)]
    tensors += chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    for data in (trainer.train_dataset, trainer.eval_dataset):
        tensors += parts_in([*getattr(data, "__dict__", {}).values()])
    memory = {_memory_of(tensor) for tensor in tensors} - {None}
    return lambda tensor: _memory_of(tensor) in memory


def identity_of(value: object) -> int | None:
    """Return the address of an object that may change in place, or of a tensor's memory; ``None`` for others."""
    if isinstance(value, torch.Tensor):
        return _memory_of(value)
    is_container = isinstance(value, (list, dict, set, deque, np.ndarray))
    return id(value) if is_container or is_generator(value) or has_only_attributes(type(value)) else None


def _memory_of(value: object) -> int | None:
    if not isinstance(value, torch.Tensor) or not _is_plain(value) or not value.numel():
        return None
    return value.untyped_storage().data_ptr()


def path_of(key: Key) -> str:
    """Return the name of an attribute in messages."""
    owner, name = key
    return f"{owner}.{name}" if owner else name


#: Marks of what libraries have done to a module in this process: Accelerate, and transformers, which adds hooks.
_MARKS = {"_is_accelerate_prepared", "_output_capturing_hooks_installed"}
#: What every module has, its mode, which a run sets itself, and marks, which mean nothing in another process.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"training"} | _MARKS
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial, type)
_MOST_PARTS = 10_000  # maximum parts of an attribute for a digest
_MOST_BYTES = 1 << 28


class _Created(NamedTuple):
    """An attribute as the program has created it."""

    value: object
    version: int | None  # of a tensor, which each operation in place increases
    digest: str | None  # of other values that can change in place


class ModuleAttributes:
    """Finds which attributes of the model, the loss function and other modules a run has changed.

    Modules have many attributes, few of which change: what cannot change in place is compared by identity, tensors by
    their version. A state keeps only what has changed.
    """

    def __init__(self) -> None:
        self._created: dict[Key, _Created] = {}
        self._owners: set[str] = set()  # those whose attributes have been noted
        self._changed: set[Key] = set()  # known to have changed
        self._left: dict[Key, object] = {}  # settings at the end of the run

    def note_created(self, owners: Mapping[str, object], is_saved: Callable[[object], bool]) -> None:
        """Note the attributes of modules, or of those among them that have not been noted yet."""
        new = {name: owner for name, owner in owners.items() if name not in self._owners}
        self._owners |= new.keys()
        digest_of = _digest_with(is_saved)
        for key, value in _attributes(new):
            self._created[key] = _Created(value, _version(value), digest_of(value, key))

    def changed(self, owners: Mapping[str, object], is_saved: Callable[[object], bool]) -> Iterator[tuple[Key, object]]:
        """Yield the attributes that the run has changed or created, of modules that have been noted."""
        digest_of = _digest_with(is_saved)
        for key, value in _attributes({name: owner for name, owner in owners.items() if name in self._owners}):
            if key in self._changed or self._has_changed(key, value, digest_of):
                self._changed.add(key)
                yield key, value

    def _has_changed(self, key: Key, value: object, digest_of: Callable[[object, Key], str | None]) -> bool:
        created = self._created.get(key)
        if created is None:
            return True
        if type(value) is not type(created.value):
            return True
        if type(value) in SCALARS:
            return value is not created.value and repr(value) != repr(created.value)
        if isinstance(value, torch.Tensor):
            if value is created.value and _version(value) == created.version:
                return False
            first = created.value  # of the same type, but it may be on another device, from which it was moved
            assert isinstance(first, torch.Tensor)
            found = digest_of(value, key)
            comparable = found if value.device == first.device else digest_of(value.to(first.device), key)
            is_changed = _version(first) != created.version if comparable is None else comparable != created.digest
            if not is_changed:
                self._created[key] = _Created(value, _version(value), found)
            return is_changed
        found = digest_of(value, key)
        return found is not None and created.digest is not None and found != created.digest

    def note_left(self, owners: Mapping[str, object]) -> None:
        """Note the settings that a run leaves."""
        self._left = {key: value for key, value in _attributes(owners) if type(value) in SCALARS}

    def undo(self, owners: Mapping[str, object]) -> None:
        """Reset settings to their created values, if they are as the run has left them."""
        for key, value in [*_attributes(owners)]:
            created = self._created.get(key)
            if created is None or not (type(value) in SCALARS and type(created.value) in SCALARS):
                continue
            if key in self._left and repr(value) == repr(self._left[key]):
                place_of(owners[key[0]], key[1])[key[1]] = created.value

    def reset_unchanged(self, owners: Mapping[str, object], kept: set[Key]) -> None:
        """Reset settings that the saved run had not changed to their created values: events may have changed them."""
        for key, created in self._created.items():
            name, attribute = key
            if key not in kept and name in owners and type(created.value) in SCALARS:
                held = vars(owners[name])
                if attribute in held and type(held[attribute]) in SCALARS:
                    held[attribute] = created.value


def owners_in_modules(trainer: TrainerLike, trained: Mapping[str, object]) -> dict[str, object]:
    """Return the modules whose attributes are kept, by name: all parts of the model, the loss function and others.

    A loss function may also be an object that is no module. Optimizers of users' classes count as modules, too.

    Args:
        trained: the trained objects by name
    """
    if not trainer.saves_attributes:
        return {}
    roots: dict[str, object] = {"model": trainer.get_model(), "loss_func": trainer.loss_func}
    held = {path_of(key): value for key, value in attributes_of_users(trainer, trained)} | dict(trained)
    roots |= {name: value for name, value in held.items() if isinstance(value, nn.Module)}
    owners: dict[str, object] = _optimizers_of_users({"optimizer": trainer.optimizer} | held)
    seen: set[int] = set()
    for root_name, root in roots.items():
        is_plain_object = root_name == "loss_func" and hasattr(root, "__dict__") and not isinstance(root, _FUNCTIONS)
        parts = root.named_modules() if isinstance(root, nn.Module) else [("", root)] if is_plain_object else []
        for name, part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                owners[f"{root_name}.{name}".removesuffix(".")] = part
    return owners


def _optimizers_of_users(held: Mapping[str, object]) -> dict[str, object]:
    """Return the optimizers among objects, and their parts, whose classes are not of a library, by name."""
    parts = {
        (f"{name}[{number}]" if number else name): part
        for name, value in held.items()
        if is_created(value)
        for number, part in enumerate(unwrapped_parts(value))
    }
    return {name: part for name, part in parts.items() if users_classes(part)}


def place_of(owner: object, name: str) -> dict[str, object]:
    """Return the dict that holds an attribute of a module: that of its attributes, or that of its buffers."""
    held = vars(owner)
    buffers: dict[str, object] = held.get("_buffers", {})
    return buffers if name in buffers else held


def shares_memory_with_weights(owner: object, value: object) -> bool:
    """Whether a tensor is a view of weights of its module, so that it must not be changed in place."""
    if not isinstance(value, torch.Tensor) or not isinstance(owner, nn.Module) or not _is_plain(value):
        return False
    weights = [*owner.parameters(), *(buffer for buffer in owner.buffers() if buffer is not value)]
    memory = value.untyped_storage().data_ptr()
    return any(_is_plain(weight) and weight.untyped_storage().data_ptr() == memory for weight in weights)


@cache
def _of_every_optimizer() -> frozenset[str]:
    """Return what every optimizer has, and a mark of torch's schedulers."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0))) | {"_opt_called"}


def _attributes(owners: Mapping[str, object]) -> Iterator[tuple[Key, object]]:
    """Yield the attributes of modules that could be kept, each object once."""
    seen: set[int] = set()
    for owner_name, owner in owners.items():
        held = dict(vars(owner))
        weights, buffers = held.get("_parameters", {}), held.get("_buffers", {})
        of_library = _of_every_optimizer() if is_created(owner) else OF_EVERY_MODULE
        left_out = of_library.union(getattr(owner, "unsaved_attributes", ()))
        held |= {name: buffers[name] for name in held.get("_non_persistent_buffers_set", ()) if name in buffers}
        for name, value in held.items():
            if name in left_out or isinstance(value, _FUNCTIONS) or id(value) in seen:
                continue
            if f"{name}_orig" in weights or f"{name}_g" in weights:  # computed in each forward pass
                continue
            if isinstance(value, torch.Tensor) and not _is_plain(value):
                continue
            if type(value) not in SCALARS:
                seen.add(id(value))
            yield (owner_name, name), value


def with_modules(owners: Mapping[str, object], is_saved: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return whether an object is one of these modules or their weights, or is saved elsewhere in a state."""
    ids: set[int] = set()
    for owner in owners.values():
        ids.add(id(owner))
        for part in ("_parameters", "_buffers"):
            ids.update(id(weight) for weight in vars(owner).get(part, {}).values() if weight is not None)
    return lambda value: id(value) in ids or is_saved(value)


def encoder_of(value: object, is_saved: Callable[[object], bool], most_parts: float = float("inf")) -> Encoder:
    """Return an encoder of an attribute. A buffer that is no part of the ``state_dict()`` is not saved elsewhere."""
    return Encoder(most_parts=most_parts) if isinstance(value, torch.Tensor) else Encoder(is_saved, most_parts)


def _digest_with(is_saved: Callable[[object], bool]) -> Callable[[object, Key], str | None]:
    """Return a function that returns the digest of an attribute; ``None`` if it is too large or has nothing to keep."""

    def digest_of(value: object, key: Key) -> str | None:
        if type(value) in SCALARS:
            return None
        try:
            node = encoder_of(value, is_saved, _MOST_PARTS).encode(value, path_of(key))
        except TooManyPartsError:
            return None
        is_large = bytes_of_node(node) > _MOST_BYTES
        return None if is_large or holds_nothing(node) else digest(node)

    return digest_of


def _version(value: object) -> int | None:
    return None if not isinstance(value, torch.Tensor) or value.is_inference() else value._version


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not sharded, nor of an unusual kind."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and is_dense(tensor)
