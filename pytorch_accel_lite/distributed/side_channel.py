"""What processes tell each other beside their collectives, even while these hang, and how long these may take."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pytorch_accel_lite.distributed.ranks import set_timeout, timeout_of

_c10d: Any = dist.distributed_c10d if dist.is_available() else None
_stores: Any = dist  # which does not declare them as its own
_PATIENCE = timedelta(seconds=10)


def connect(name: str) -> Any:
    """Return a store of short texts by key, which all processes of the job share; ``None`` if there is none.

    It has a connection of its own to the store through which the processes met. The job's own connection is of no use
    here: a collective that waits on it would make every other user of it wait.

    :param name: prefix of all keys, the same on every process, and different from those of earlier stores
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store = _c10d._get_default_store()
    while isinstance(store, _stores.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, _stores.TCPStore):
        return None
    own = _stores.TCPStore(store.host, store.port, None, False, _PATIENCE, wait_for_workers=False)
    return _stores.PrefixStore(name, own)


class GroupTimeouts:
    """Changes how long a collective of any process group may take, and restores that."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, timedelta]] = []

    def set(self, seconds: float) -> None:
        """Let collectives fail after this many seconds."""
        if self._before or not (dist.is_available() and dist.is_initialized()):
            return
        for group in list(_c10d._world.pg_map):
            if isinstance(group, dist.ProcessGroup):
                self._before.append((group, timeout_of(group)))
                set_timeout(group, timedelta(seconds=seconds))

    def restore(self) -> None:
        """Restore what :meth:`set` has changed."""
        for group, timeout in self._before:
            set_timeout(group, timeout)
        self._before.clear()
