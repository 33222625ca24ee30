"""Logical processes, ``Trainer(logical_processes=8)``: the same bits on any number of real processes."""

from pytorch_accel_lite.extending import DIVISIONS, STEP_KINDS
from pytorch_accel_lite.extensions.logical.callback_states import KeepsShares
from pytorch_accel_lite.extensions.logical.logical_processes import LogicalProcesses, logical_of_trainer
from pytorch_accel_lite.extensions.logical.logical_step import LogicalStep, LogicalWindow
from pytorch_accel_lite.extensions.logical.sharded_gradients import sharded_modules
from pytorch_accel_lite.extensions.logical.shared_losses import SharedLossTrackers

__all__ = [
    "KeepsShares",
    "LogicalProcesses",
    "LogicalStep",
    "LogicalWindow",
    "SharedLossTrackers",
    "logical_of_trainer",
    "sharded_modules",
]

DIVISIONS["logical_processes"] = LogicalProcesses
STEP_KINDS.append(LogicalStep)
