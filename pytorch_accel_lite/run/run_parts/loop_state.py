"""What only the loop needs to know of a run, such as the modes of torch after its starting events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn


class GlobalModes(NamedTuple):
    """Settings of torch that hold for the whole process.

    Attributes:
        gradients: whether gradients are computed
        autocast: whether autocast is enabled for the device of the trainer
        dtype: the dtype of new tensors
    """

    gradients: bool
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> GlobalModes:
        """Return the current settings."""
        return cls(torch.is_grad_enabled(), torch.is_autocast_enabled(device.type), torch.get_default_dtype())


@dataclass(slots=True, eq=False, repr=False)
class LoopState:
    """What only the functions in ``loop/`` need to know of a run.

    Attributes:
        uses_builtin_loop: whether the package's own loop has begun, rather than that of an overridden ``_run_training``
        has_update_schedules: whether evaluations, or the sizes of windows, are scheduled by updates
        global_modes: settings of torch after the starting events
        must_warm_up_ddp: whether ``DistributedDataParallel`` still has to arrange its gradients
        must_compare_replicas: whether the first update still has to be compared between the processes
        updates_at_start: the number of updates that the run has resumed from
        without_gradient: the parameters that had no gradient on this process in the first update
        must_sync_at_start: whether the processes synchronise at the start of the next step, because a callback of a
            resumed run may stop it there: the saved run had come to the stop, but not ended yet
    """

    uses_builtin_loop: bool = False
    has_update_schedules: bool = False
    global_modes: GlobalModes | None = None
    must_warm_up_ddp: bool = False
    must_compare_replicas: bool = False
    updates_at_start: int = 0
    without_gradient: list[nn.Parameter] = field(default_factory=list)
    must_sync_at_start: bool = False
