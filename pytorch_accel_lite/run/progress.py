"""How far a run has got, and what else only its loop needs to know."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import nn


class EpochPhase(IntEnum):
    """How far an epoch has got: steps running, steps done, evaluation done, ending events done."""

    TRAINING = 0
    TRAINED = 1
    EVALUATED = 2
    ENDED = 3  # all but the final checkpoint


@dataclass
class Progress:
    """The progress of a training run. Written by the trainer; treat it as read-only.

    Args:
        epoch: the epoch being trained, counted from 1; 0 before the first
        epochs_completed: number of epochs completed, including their evaluation
        step: number of batches that each process has completed in this epoch
        update: number of optimizer updates in the run, including those skipped by a gradient scaler
        samples_in_epoch: number of samples consumed in this epoch by all processes together
        samples: number of samples consumed in the run by all processes together
    """

    epoch: int = 0
    epochs_completed: int = 0
    step: int = 0
    update: int = 0
    samples_in_epoch: int = 0
    samples: int = 0

    @property
    def is_mid_epoch(self) -> bool:
        """Whether the current epoch has been started, but not completed."""
        return self.step > 0 and self.epochs_completed < self.epoch

    def start_epoch(self) -> None:
        """Enter the next epoch."""
        self.epoch = self.epochs_completed + 1
        self.step = 0
        self.samples_in_epoch = 0

    def add_samples(self, count: int) -> None:
        """Add to the number of samples consumed by all processes together."""
        self.samples_in_epoch += count
        self.samples += count

    def state_dict(self) -> dict[str, int]:
        """Return the counts as a dict."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load counts returned by ``state_dict()``."""
        wrong = sorted(state.keys() ^ asdict(self).keys())
        if wrong:
            raise KeyError(f"The counts {wrong} are missing or unknown; progress has {', '.join(asdict(self))}.")
        for name, value in state.items():
            setattr(self, name, int(value))


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
