"""Counting the bytes of the tensors that are alive, and sorting those at the peak by purpose."""

from __future__ import annotations

import math
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytorch_accel_lite.extension_tools.modules_and_devices import local_shard

#: The kinds of purposes that memory has, in the order in which reports list them.
KINDS = ("parameters", "buffers", "gradients", "optimizer", "averages", "activations", "communication", "temporary")
_FRAMES_TO_SEARCH = 32
_READ_NUMBER = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001

#: Returns the tensors whose purpose is known, as pairs of a kind and a tensor.
Owners = Callable[[], Iterable[tuple[str, torch.Tensor]]]


@dataclass(eq=False, repr=False)
class _LiveStorage:
    """A storage that is alive: a weak reference that reports when it is freed, its kind, and its size in bytes."""

    freed: weakref.ref[torch.UntypedStorage]
    kind: str
    size: int = 0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors on a kind of device that are alive within a block, fake ones included.

    Memory is counted by storage, from the operation that returns it until it is freed, so views count once. Memory that
    an operation allocates and frees before it returns is not counted.

    Args:
        device: the device whose tensors count
        owners: returns the kinds of tensors; tensors without one are activations if autograd may need them, else
            temporary
        block: size in bytes; the size of each storage is rounded up to a multiple of it, as allocators do

    Attributes:
        is_updating: whether an optimizer is making its step
        flops: the number of operations in the block, if they were counted
        peak: the largest number of bytes that were alive at a time
        at_peak: the bytes at the peak, by kind; exact in total, and within 1 % of it by kind
        stage: the stage of the step at the peak: ``"forward pass"``, ``"backward pass"`` or ``"update"``
    """

    def __init__(self, device: torch.device, owners: Owners, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self._owners = owners
        self._block = block
        self._storages: dict[int, _LiveStorage] = {}
        self._bytes: Counter[str] = Counter()
        self._total = 0
        self._sorted_at = 0
        self._resize = torch.UntypedStorage.resize_
        self.is_updating = False
        self.flops = 0
        self.forget_peak()

    def forget_peak(self) -> None:
        """Forget the peak so far, and look for the next one."""
        self.peak = 0
        self._sorted_at = 0
        self.at_peak: Counter[str] = Counter()
        self.stage = ""

    def __enter__(self) -> Self:
        resize = self._resize

        # FSDP frees and allocates parameters by resizing their storages.
        def resize_and_count(storage: torch.UntypedStorage, size: int) -> object:
            result = resize(storage, size)
            self._measure(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[assignment,method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its results. An optimizer that reads the number in a fake tensor gets 1."""
        if self.is_updating and func is _READ_NUMBER and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, whose operations on local shards come here, too
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device:
                self.note(leaf)
        return result

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor, if it is not counted yet."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._storages:
            freed = weakref.ref(storage, lambda _: self._forget(key))
            self._storages[key] = _LiveStorage(freed, kind=_kind_of_new())
        self._measure(storage)

    def _measure(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage that is counted."""
        live = self._storages.get(id(storage))
        if live is not None:
            before, live.size = live.size, math.ceil(storage.nbytes() / self._block) * self._block
            self.add(live.kind, live.size - before)

    def _forget(self, key: int) -> None:
        live = self._storages.pop(key)
        self.add(live.kind, -live.size)

    def add(self, kind: str, size: int) -> None:
        """Count bytes. Called directly for memory that no tensor shows, such as the buffers of a wrapper."""
        self._total += size
        self._bytes[kind] += size
        if self._total > self.peak:
            self.peak = self._total
            if self._total > 1.01 * self._sorted_at:
                self._sort()
            self.at_peak = self._bytes.copy()
            in_backward = torch._C._current_graph_task_id() >= 0  # noqa: SLF001
            self.stage = "backward pass" if in_backward else "update" if self.is_updating else "forward pass"

    def _sort(self) -> None:
        """Sort the tensors by kind. Some kinds become known only later, as when a tensor becomes a gradient."""
        self._sorted_at = self._total
        for kind, tensor in self._owners():
            live = self._storages.get(id(local_shard(tensor).untyped_storage()))
            if live is not None:
                self._bytes[live.kind] -= live.size
                self._bytes[kind] += live.size
                live.kind = kind


def _kind_of_new() -> str:
    """Return the kind of a new tensor, as far as the call stack shows it."""
    frames = islice(traceback.walk_stack(sys._getframe(1)), _FRAMES_TO_SEARCH)  # noqa: SLF001
    if any("torch/distributed/fsdp" in frame.f_code.co_filename.replace("\\", "/") for frame, _ in frames):
        return "communication"
    return "activations" if torch.is_grad_enabled() else "temporary"
