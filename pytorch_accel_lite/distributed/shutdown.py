"""Leaving a job of several processes in order: without it, an interpreter may abort while it exits."""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from accelerate import Accelerator


class Closable(Protocol):
    """What is closed at the end of the program."""

    def close(self) -> None:
        """Free what it holds."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_job: list[Accelerator] = []  # what leads out of the job: it outlives trainers that were dropped without being closed
_EXIT_TIMEOUT = timedelta(seconds=30)


def register(owner: Closable, accelerator: Accelerator) -> None:
    """Have something closed, and the job left in order, at the end of the program. A job cannot be joined again."""
    _open.add(owner)
    _job[:] = [accelerator]


def unregister(owner: Closable) -> bool:
    """Mark something as closed, and return whether it was open."""
    is_open = owner in _open
    _open.discard(owner)
    return is_open


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
    for owner in list(_open):
        owner.close()
    if _job:
        _leave(wait=not failed)
