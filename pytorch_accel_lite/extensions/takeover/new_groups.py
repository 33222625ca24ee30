"""Creating process groups and device meshes while processes may be lost, and after a restart of the program."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pytorch_accel_lite.extension_tools.processes import set_timeout
from pytorch_accel_lite.extensions.takeover.membership import COLLECTIVE, CONNECTING, Membership


def watch_new_groups(membership: Membership) -> None:
    """Add a barrier before ``new_group``: without it, torch blocks until its timeout if a process is lost."""
    module: Any = dist.distributed_c10d
    make = module._new_group_with_tag  # noqa: SLF001  # torch's meshes use no other function
    signature = inspect.signature(make)

    def wait_and_make(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if arguments.get("use_local_synchronization"):
            return make(*args, **kwargs)
        timeout: timedelta = arguments.get("timeout") or COLLECTIVE
        with membership.making_group():
            group = make(**arguments | {"timeout": CONNECTING})
        if isinstance(group, dist.ProcessGroup):
            set_timeout(group, timeout)
        return group

    module._new_group_with_tag = wait_and_make  # noqa: SLF001


def distinguish_meshes(membership: Membership) -> None:
    """Make meshes unequal to those from before a restart of the program.

    Torch caches values by mesh, such as the position of this process in it, and would reuse them for an equal mesh.
    Meshes of different threads are unequal, for torch's own tests, so the number of restarts serves as the thread's id.
    """
    mesh: Any = DeviceMesh
    begin = mesh.__init__

    def begin_apart(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._thread_id, self._hash = membership.restart.count, None

    mesh.__init__ = begin_apart
