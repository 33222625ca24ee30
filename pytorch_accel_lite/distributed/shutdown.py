"""Leaving a job of several processes in order: without it, an interpreter may abort while it exits."""

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
_job: list[Accelerator] = []  # what leads out of the job: it outlives trainers that were dropped without being closed
_EXIT_TIMEOUT = timedelta(seconds=30)


def register(trainer: Trainer) -> None:
    """Have a trainer closed, and the job left in order, at the end of the program. A job cannot be joined again."""
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
    gc.collect()  # what is left of DistributedDataParallel must go before its process group does
    failed = hasattr(sys, "last_type")  # set when the interpreter has printed an uncaught error
    if not failed and dist.is_available() and dist.is_initialized():
        if dist.get_backend() == "gloo":
            with suppress(RuntimeError):  # a peer has failed: it will not come
                dist.monitored_barrier(timeout=_EXIT_TIMEOUT)
        else:
            dist.barrier()
    _job.pop().end_training()
