"""An asynchronous device, simulated on the CPU, for tests of GPU behaviour without a GPU.

Importing this module adds the device ``sim`` to torch for the rest of the process (as its own backend, in Python). Its
tensors lie in a memory of their own: each operation on them is run on a CPU tensor behind them. As with a GPU,

- copies to host memory with ``non_blocking=True`` hold nothing of use until an event that was recorded after them has
  happened, here so many operations later;
- what would make Python wait for the device is counted in ``waits``: reading a number, copies that block, in either
  direction, waiting for an event that has not happened;
- an operation takes tensors of one memory, but for single numbers, and indices in brackets.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

#: Number of operations after which an event is complete.
LATENCY = 40
#: Number of times that Python has waited for the device, by reason.
waits: Counter[str] = Counter()
#: Number of copies to the device, blocking or not.
copies: Counter[str] = Counter()

_MIXED = {"aten::copy_", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"}
_READING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::is_nonzero"}


class _Clock:
    """Counts operations, and runs postponed actions when they are due."""

    def __init__(self) -> None:
        self.now = 0
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._lock = threading.RLock()  # a thread that writes states waits for events, too

    def tick(self) -> None:
        with self._lock:
            self.now += 1
            while self.pending and self.pending[0][0] <= self.now:
                self._arrive()

    def put_off(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._lock:
            self.pending.append((self.now + LATENCY, target, source.clone()))

    def finish(self) -> None:
        with self._lock:
            while self.pending:
                self._arrive()

    def _arrive(self) -> None:
        _, target, source = self.pending.pop(0)
        target.copy_(source)


_clock = _Clock()
#: Pinned host memory in use, by address: copies to it do not block.
_pinned: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()


class Event:
    """An event that is complete once all operations recorded before it are done."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.happens: int | None = None

    def record(self) -> None:
        self.happens = _clock.now + LATENCY

    def query(self) -> bool:
        _clock.tick()
        return self.happens is None or _clock.now >= self.happens

    def synchronize(self) -> None:
        if not self.query():
            waits["event"] += threading.current_thread() is threading.main_thread()  # the one that trains
            _clock.finish()

    def elapsed_time(self, later: Event) -> float:
        assert self.happens is not None
        assert later.happens is not None
        assert later.query()
        return float(later.happens - self.happens)


class _Module:
    """The module ``torch.sim``."""

    Event = Event
    memory = SimpleNamespace(_dump_snapshot=lambda path: Path(path).write_text("snapshot"))
    name = "Simulated L4"
    _peaks = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=2**30)

    def get_device_name(self, device: torch.device) -> str:
        return self.name

    def manual_seed(self, seed: int) -> None:
        pass

    def synchronize(self) -> None:
        waits["synchronize"] += 1
        _clock.finish()

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self._peaks += 1

    def max_memory_allocated(self, device: torch.device) -> int:
        """Return a value that grows by a MiB with each reset."""
        return self._peaks * 2**20

    def max_memory_reserved(self, device: torch.device) -> int:
        return 2 * self.max_memory_allocated(device)

    def get_rng_state(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        assert len(state) == 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False


class SimulatedTensor(torch.Tensor):
    """A tensor on the device; ``_host`` is the CPU tensor behind it."""

    _host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> SimulatedTensor:
        tensor: SimulatedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.size(), host.stride(), host.storage_offset(), dtype=host.dtype, device=torch.device("sim:0")
        )
        tensor._host = host
        return tensor

    def __init__(self, host: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))

    def tolist(self) -> Any:  # torch refuses it for subclasses
        waits["copy to host"] += 1
        return self._host.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """It is loaded as a CPU tensor, as if by ``map_location="cpu"``."""
        waits["copy to host"] += 1
        return self._host.detach().__reduce_ex__(protocol)

    def untyped_storage(self) -> torch.UntypedStorage:  # for its address
        return self._host.untyped_storage()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{self._host!r} on sim"


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Change what an operation takes or returns, also within lists and tuples; pytrees of torch take longer."""
    if isinstance(value, (list, tuple)):
        return type(value)([_map(change, each) for each in value])  # type: ignore[call-arg]
    return change(value)


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU tensors behind the device's; what comes of it lies on the device."""
    _clock.tick()
    name, target = func.name(), kwargs.get("device")
    if name in _READING:
        waits[name] += 1
    hosts: dict[int, SimulatedTensor] = {}
    memories: set[bool] = set()  # those of the tensors

    def to_host(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_ours = isinstance(value, SimulatedTensor)
        if value.ndim:
            memories.add(is_ours)
        if is_ours:
            hosts[id(value._host)] = value
            return value._host
        return value

    def to_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, SimulatedTensor):
            return value
        return hosts[id(value)] if id(value) in hosts else SimulatedTensor(value)

    if name == "aten::copy_" and isinstance(args[0], SimulatedTensor) != isinstance(args[1], SimulatedTensor):
        return _copy_across(*args)
    if target is not None and torch.device(target).type == "cpu":
        return _copy_to_host(args[0], func, kwargs)
    if name == "aten::_to_copy" and not isinstance(args[0], SimulatedTensor):
        copies["to device"] += 1
        if not kwargs.get("non_blocking"):
            waits["copy to device"] += 1
    host_args = _map(to_host, args)
    host_kwargs = {key: _map(to_host, value) for key, value in kwargs.items()}
    if name not in _MIXED and len(memories) > 1:
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device.")
    if target is not None:
        host_kwargs["device"] = "cpu"
    return _map(to_device, func(*host_args, **host_kwargs))


def _copy_across(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between the memories. What is not pinned is copied to the device before Python goes on, as with CUDA."""
    if not non_blocking:
        waits["copy to host" if isinstance(source, SimulatedTensor) else "copy to device"] += 1
    if isinstance(source, SimulatedTensor):
        if non_blocking:
            assert target.data_ptr() in _pinned, "only copies that torch makes itself are pinned"
            _clock.put_off(target, source._host)
        else:
            target.copy_(source._host)
    else:
        assert isinstance(target, SimulatedTensor)
        target._host.copy_(source)
    return target


def _copy_to_host(source: SimulatedTensor, func: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Copy to new host memory, which is pinned by torch where copies do not block."""
    copied: torch.Tensor = func(source._host, **kwargs)
    if not kwargs.get("non_blocking"):
        waits["copy to host"] += 1
        return copied
    nothing = torch.full_like(copied, float("nan") if copied.is_floating_point() else -1)
    if nothing.numel():
        _pinned[nothing.data_ptr()] = nothing.untyped_storage()
    _clock.put_off(nothing, copied)
    return nothing


_setup_privateuseone_for_python_backend("sim", _Module())
# So that ``module.to("sim")`` keeps its parameters, which an optimizer knows, as it does for a GPU.
torch.__future__.set_swap_module_params_on_conversion(True)
_all_operations = torch.library.Library("_", "IMPL")
_all_operations.fallback(_run, "PrivateUse1")
_own_operations = torch.library.Library("aten", "IMPL")
_own_operations.impl("_to_copy", partial(_run, torch.ops.aten._to_copy.default), "PrivateUse1")  # no fallback serves it
