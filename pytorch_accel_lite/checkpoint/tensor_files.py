"""Tensors in files of their own: sharded and large ones leave a state to be written, and return when it is read."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pytorch_accel_lite.checkpoint.shards import READABLE, Piece, read_like, read_whole, shape_of

_MARK = "in the shards, as"  # the only key of a dict that stands for a tensor
_MODEL = "model"
_LARGE = 1 << 16  # bytes from which a tensor is worth an entry in a file of tensors
Find = Callable[[tuple[Any, ...]], Any]


def take_out_sharded(state: Any, pieces: dict[str, Any]) -> Any:
    """Return a state with each sharded tensor replaced by a mark, and collect the tensors by name."""
    return _take_out(state, pieces, lambda value: hasattr(value, "full_tensor"))


def take_out_large(state: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a state with each large tensor replaced by a mark, and collect the tensors by name.

    Files of tensors are written and read faster than pickled ones, but lack what some tensors have: memory that they
    share, gaps or another order of elements in memory, rare types. Such tensors stay where they are.
    """
    found = [value for value in tree_leaves(state) if type(value) is torch.Tensor and value.layout == torch.strided]
    owners = Counter(value.untyped_storage().data_ptr() for value in found)

    def is_large(value: Any) -> bool:
        return (
            type(value) is torch.Tensor
            and value.layout == torch.strided
            and value.dtype in READABLE
            and value.nbytes >= _LARGE
            and value.is_contiguous()
            and not value.requires_grad
            and value.untyped_storage().nbytes() == value.nbytes
            and owners[value.untyped_storage().data_ptr()] == 1
        )

    return _take_out(state, tensors, is_large)


def _take_out(value: Any, taken: dict[str, Any], is_taken: Callable[[Any], bool], *path: Any) -> Any:
    """Return nested dicts, lists and tuples with marks.

    :param path: the keys that lead to the value
    """
    if is_taken(value):
        name = ".".join(map(str, path))
        while name in taken:  # a key may have dots, too
            name += "'"
        taken[name] = value
        return {_MARK: name}
    if isinstance(value, Mapping):
        marked = {key: _take_out(item, taken, is_taken, *path, key) for key, item in value.items()}
        return value if all(marked[key] is value[key] for key in marked) else _of_kind(value, marked)
    if type(value) in (list, tuple):
        return type(value)(_take_out(item, taken, is_taken, *path, index) for index, item in enumerate(value))
    return value


def _of_kind(value: Mapping[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    return OrderedDict(items) if isinstance(value, OrderedDict) else items


def take_out_weights(weights: Mapping[str, Any], pieces: dict[str, Any]) -> dict[str, Any]:
    """Return the weights that are not sharded, and collect those that are."""
    whole = {}
    for name, value in weights.items():
        if hasattr(value, "full_tensor"):
            pieces[f"{_MODEL}.{name}"] = value
        else:
            whole[name] = value
    return whole


def read_weights_like(pieces: Mapping[str, list[Piece]], own: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sharded weights of a state, sharded as a model has them if it has them in that shape; else whole.

    :param own: the weights of the model
    """
    names = {name: name.removeprefix(f"{_MODEL}.") for name in pieces if name.startswith(f"{_MODEL}.")}
    return {short: _read(pieces, name, own.get(short)) for name, short in names.items()}


def restore_tensors(value: Any, pieces: Mapping[str, list[Piece]], find: Find, *path: Any) -> Any:
    """Return nested dicts, lists and tuples with each mark replaced by its tensor.

    :param find: returns the tensor for a path like which its tensor is sharded, if there is one
    """
    if isinstance(value, Mapping):
        if value.keys() == {_MARK}:
            return _read(pieces, value[_MARK], find(path))
        read = {key: restore_tensors(item, pieces, find, *path, key) for key, item in value.items()}
        return value if all(read[key] is value[key] for key in read) else _of_kind(value, read)
    if type(value) in (list, tuple):
        return type(value)(restore_tensors(item, pieces, find, *path, index) for index, item in enumerate(value))
    return value


def _read(pieces: Mapping[str, list[Piece]], name: str, like: Any) -> Any:
    of_tensor = pieces[name]
    if not hasattr(like, "device_mesh") or tuple(like.shape) != shape_of(of_tensor):
        return read_whole(of_tensor, name)
    return read_like(of_tensor, like, name)
