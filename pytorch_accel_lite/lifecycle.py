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
    from pytorch_accel_lite.base import TrainerBase

_open: weakref.WeakSet[TrainerBase] = weakref.WeakSet()
_job: list[Accelerator] = []  # what leads out of the job: it outlives trainers that were dropped without being closed
_EXIT_TIMEOUT = timedelta(seconds=30)


def register(trainer: TrainerBase) -> None:
    """Remember a trainer, so that its job is left in order at the end of the program."""
    _open.add(trainer)
    _job[:] = [trainer.accelerator]


def close(trainer: TrainerBase) -> None:
    """Free what a trainer holds. The job is left at the end of the program only: it cannot be entered again."""
    if trainer not in _open:
        return
    _open.discard(trainer)
    trainer._train_dataloader = trainer._eval_dataloader = None
    trainer.accelerator.free_memory()


def _leave(wait: bool) -> None:
    gc.collect()  # what is left of DistributedDataParallel must go before its process group does
    if dist.is_available() and dist.is_initialized():
        if wait and dist.get_backend() == "gloo":
            with suppress(RuntimeError):  # a peer has failed: it will not come
                dist.monitored_barrier(timeout=_EXIT_TIMEOUT)
        elif wait:
            dist.barrier()
    _job.pop().end_training()


@atexit.register
def _close_all() -> None:
    failed = hasattr(sys, "last_type")  # set when the interpreter has printed an uncaught error
    for trainer in list(_open):
        close(trainer)
    if _job:
        _leave(wait=not failed)
