"""How a program makes process groups, such as those of a mesh, without waiting for a process that is lost meanwhile."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import torch.distributed as dist

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
