"""Taking large and sharded tensors out of a state, for files of their own, and putting them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from pytorch_accel_lite.base.types import Keys, Tree
from pytorch_accel_lite.checkpoint.disk.safetensors_files import fits_safetensors
from pytorch_accel_lite.checkpoint.disk.shards import is_sharded_tensor
from pytorch_accel_lite.checkpoint.disk.torch_files import map_nested
from pytorch_accel_lite.run.training_state import OpenTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MARK = "in the shards, as"  # the only key of a dict that stands for a tensor
_LARGE = 1 << 16  # minimum size in bytes of a tensor that is moved to a file of tensors


def extract_tensors(state: Tree, sharded: dict[str, DTensor], large: dict[str, torch.Tensor]) -> Tree:
    """Return nested dicts, lists and tuples with each sharded or large tensor replaced by a mark.

    Files of tensors are faster to write and read than pickled ones, but cannot represent shared memory, strides or rare
    types. Tensors with such properties stay in the state.

    Args:
        sharded: gets the sharded tensors, by name
        large: gets the large tensors
    """
    owners: Counter[int] = Counter()

    def count(path: Keys, value: Tree) -> None:
        if type(value) is torch.Tensor and fits_safetensors(value):
            owners[value.untyped_storage().data_ptr()] += 1

    def is_large(value: Tree) -> bool:
        return (
            type(value) is torch.Tensor
            and fits_safetensors(value)
            and value.nbytes >= _LARGE
            and value.is_contiguous()
            and not value.requires_grad
            and value.untyped_storage().nbytes() == value.nbytes
            and owners[value.untyped_storage().data_ptr()] == 1
        )

    def extract(path: Keys, value: Tree) -> Tree:
        if not is_sharded_tensor(value) and not is_large(value):
            return value
        name = ".".join(map(str, path))
        while name in sharded or name in large:  # keys may have dots, so names may clash
            name += "'"
        (sharded if is_sharded_tensor(value) else large)[name] = value
        return {_MARK: name}

    map_nested(count, state)
    return map_nested(extract, state)


def restore_tensors(
    state: Tree, stored: Mapping[str, OpenTensor], find_like: Callable[[Keys], torch.Tensor | None]
) -> Tree:
    """Return the state that was passed to ``extract_tensors()``.

    Args:
        find_like: returns, for a path of keys, a tensor whose sharding to use, if any
    """

    def restore(path: Keys, value: Tree) -> Tree:
        return stored[value[_MARK]].read(find_like(path)) if _is_mark(value) else value

    return map_nested(restore, state, is_leaf=_is_mark)


def _is_mark(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() == {_MARK}
