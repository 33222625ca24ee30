"""Orderly shutdown of a job of several processes: without it, an interpreter may abort while exiting."""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from accelerate import Accelerator

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

_open: weakref.WeakSet[Trainer] = weakref.WeakSet()
_job: list[Accelerator] = []  # ends the job, even if its trainers were dropped without being closed
_EXIT_TIMEOUT = timedelta(seconds=30)


def register(trainer: Trainer) -> None:
    """Close a trainer and leave its job when the program exits. A job cannot be joined again."""
    _open.add(trainer)
    _job[:] = [trainer.accelerator]


def unregister(trainer: Trainer) -> bool:
    """Mark a trainer as closed, and return whether it was open."""
    is_open = trainer in _open
    _open.discard(trainer)
    return is_open


@atexit.register
def _close_all() -> None:
    for trainer in list(_open):
        trainer.close()
    if not _job:
        return
    gc.collect()  # remains of DistributedDataParallel must be freed before its process group
    failed = hasattr(sys, "last_type")  # set once the interpreter has printed an uncaught error
    if not failed and dist.is_available() and dist.is_initialized():
        if dist.get_backend() == "gloo":
            with suppress(RuntimeError):  # a peer has failed
                dist.monitored_barrier(timeout=_EXIT_TIMEOUT)
        else:
            dist.barrier()
    _job.pop().end_training()
