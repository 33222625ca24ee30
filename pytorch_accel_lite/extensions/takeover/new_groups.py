"""How a program makes process groups and meshes while processes are lost, and again once it has begun again."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pytorch_accel_lite.extending import set_timeout
from pytorch_accel_lite.extensions.takeover.membership import COLLECTIVE, CONNECTING, Membership


def watch_new_groups(membership: Membership) -> None:
    """Let the processes meet before they make a group, as torch would let them wait for all of its time limit."""
    module: Any = dist.distributed_c10d
    make = module._new_group_with_tag  # noqa: SLF001  # torch's meshes use no other function
    signature = inspect.signature(make)

    def meet_and_make(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if arguments.get("use_local_synchronization"):
            return make(*args, **kwargs)
        timeout: timedelta = arguments.get("timeout") or COLLECTIVE
        with membership.making_group():
            group = make(**arguments | {"timeout": CONNECTING})
        if isinstance(group, dist.ProcessGroup):
            set_timeout(group, timeout)
        return group

    module._new_group_with_tag = meet_and_make  # noqa: SLF001


def tell_meshes_apart(membership: Membership) -> None:
    """Let no mesh be equal to one from before the program has begun again.

    Torch keeps what it computes for a mesh, with the position of this process in it, and has it for each mesh that is
    equal. Meshes of different threads are not, as in torch's own tests.
    """
    mesh: Any = DeviceMesh
    begin = mesh.__init__

    def begin_apart(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._thread_id, self._hash = membership.beginnings, None

    mesh.__init__ = begin_apart
