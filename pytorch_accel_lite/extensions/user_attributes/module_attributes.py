"""Attributes of the users' modules that are no parameters or saved buffers, such as counters and hidden states."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from pytorch_accel_lite.extending import TrainerLike
from pytorch_accel_lite.extensions.user_attributes.attribute_owners import Key, attributes_of_users, path_of
from pytorch_accel_lite.extensions.user_attributes.plain_objects import (
    SCALARS,
    Encoder,
    TooManyPartsError,
    digest,
    holds_nothing,
    tensors_of_node,
)

#: What every module has, its mode, which a run sets itself, and a note of Accelerate's.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"training", "_is_accelerate_prepared"}
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
            was_kept = _version(created.value) == created.version  # so the noted object still has its first value
            if value is created.value or not was_kept or digest_of(value, key) != digest_of(created.value, key):
                return True
            self._created[key] = _Created(value, _version(value), None)  # it was moved to the device
            return False
        found = digest_of(value, key)
        return found is not None and created.digest is not None and found != created.digest

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

    A loss function may also be an object that is no module.

    Args:
        trained: the trained objects by name
    """
    if not trainer.saves_attributes:
        return {}
    roots: dict[str, object] = {"model": trainer.get_model(), "loss_func": trainer.loss_func}
    held = {path_of(key): value for key, value in attributes_of_users(trainer, trained)} | dict(trained)
    roots |= {name: value for name, value in held.items() if isinstance(value, nn.Module)}
    owners: dict[str, object] = {}
    seen: set[int] = set()
    for root_name, root in roots.items():
        is_plain_object = root_name == "loss_func" and hasattr(root, "__dict__") and not isinstance(root, _FUNCTIONS)
        parts = root.named_modules() if isinstance(root, nn.Module) else [("", root)] if is_plain_object else []
        for name, part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                owners[f"{root_name}.{name}".removesuffix(".")] = part
    return owners


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


def _attributes(owners: Mapping[str, object]) -> Iterator[tuple[Key, object]]:
    """Yield the attributes of modules that could be kept, each object once."""
    seen: set[int] = set()
    for owner_name, owner in owners.items():
        held = dict(vars(owner))
        weights, buffers = held.get("_parameters", {}), held.get("_buffers", {})
        left_out = _OF_EVERY_MODULE.union(getattr(owner, "unsaved_attributes", ()))
        held |= {name: buffers[name] for name in held.get("_non_persistent_buffers_set", ()) if name in buffers}
        for name, value in held.items():
            if name in left_out or isinstance(value, _FUNCTIONS) or id(value) in seen:
                continue
            if f"{name}_orig" in weights or f"{name}_g" in weights:  # computed in each forward pass
                continue
            if isinstance(value, torch.Tensor) and (not _is_plain(value) or value.grad_fn is not None):
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
        is_large = sum(tensor.nbytes for tensor in tensors_of_node(node)) > _MOST_BYTES
        return None if is_large or holds_nothing(node) else digest(node)

    return digest_of


def _version(value: object) -> int | None:
    return None if not isinstance(value, torch.Tensor) or value.is_inference() else value._version


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not sharded, nor of an unusual kind."""
    is_usual = type(tensor) in (torch.Tensor, nn.Parameter)
    return is_usual and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
