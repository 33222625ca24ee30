"""The process groups of a job: a connection to their key-value store, and their timeouts."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pytorch_accel_lite.extension_tools.processes import set_timeout, timeout_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_c10d: Any = dist.distributed_c10d if dist.is_available() else None
_stores: Any = dist  # its type stubs lack the stores
_STORE_TIMEOUT = timedelta(seconds=10)


def connect_to_store(name: str) -> Store | None:
    """Return a key-value store that all processes of the job share; ``None`` if there is none.

    It is a separate connection to the store of the default process group. The group's own connection cannot be shared:
    a collective that waits on it would block all other users.

    Args:
        name: prefix of all keys, the same on every process, and different from those of earlier stores
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store = _c10d._get_default_store()
    while isinstance(store, _stores.PrefixStore):
        store = store.underlying_store
    if isinstance(store, _stores.TCPStore):
        store = _stores.TCPStore(store.host, store.port, None, False, _STORE_TIMEOUT, wait_for_workers=False)
    elif not isinstance(store, _stores.FileStore):  # a FileStore has no connection
        return None
    named: Store = _stores.PrefixStore(name, store)
    return named


class GroupTimeouts:
    """Changes how long a collective of any process group may take, and restores the previous timeouts."""

    def __init__(self) -> None:
        self._before: list[tuple[dist.ProcessGroup, timedelta]] = []

    def set(self, seconds: float) -> None:
        """Make collectives fail after this many seconds."""
        if self._before or not (dist.is_available() and dist.is_initialized()):
            return
        for group in list(_c10d._world.pg_map):
            if isinstance(group, dist.ProcessGroup):
                self._before.append((group, timeout_of(group)))
                set_timeout(group, timedelta(seconds=seconds))

    def restore(self) -> None:
        """Restore what ``set()`` has changed."""
        for group, timeout in self._before:
            set_timeout(group, timeout)
        self._before.clear()
