"""Orderly shutdown of a job of several processes, without which an interpreter may abort while exiting."""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from accelerate import Accelerator

from pytorch_accel_lite.distributed.job_observers_seam import OBSERVERS, OpenTrainer
from pytorch_accel_lite.distributed.lost_processes import is_about_lost_process
from pytorch_accel_lite.distributed.ranks import Ranks
from pytorch_accel_lite.distributed.stack_frames import AT_THE_END

AT_THE_END.add(__file__)
_open: weakref.WeakSet[OpenTrainer] = weakref.WeakSet()
_job: list[tuple[Accelerator, Ranks]] = []  # ends the job even if its trainers were never closed
_last_run_failed = False  # even if the program has caught the error
_EXIT_TIMEOUT = timedelta(seconds=30)


def register(trainer: OpenTrainer) -> None:
    """Close a trainer and leave its job when the program exits. A job cannot be joined again."""
    if trainer.ranks.world_size > 1 and trainer.ranks.is_observed:
        for observer in OBSERVERS:
            observer.begin(trainer.ranks)
    _open.add(trainer)
    _job[:] = [(trainer.accelerator, trainer.ranks)]


def open_trainers() -> list[OpenTrainer]:
    """Return the trainers of this process that have not been closed."""
    return list(_open)


def unregister(trainer: OpenTrainer) -> bool:
    """Mark a trainer as closed, and return whether it was open."""
    is_open = trainer in _open
    _open.discard(trainer)
    return is_open


def record_end(failed: bool) -> None:
    """Remember whether the last run of this process ended with an error: other processes may still be in a run."""
    global _last_run_failed
    _last_run_failed = failed


@atexit.register
def _close_all() -> None:
    _leave_job()
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1"):  # no interactive session
        # If an exit handler, such as one of torch, runs code from a string, the interpreter forgets that Ctrl-C has
        # ended the program, and exits with 1. An interrupt in such code restores that.
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _uncaught_error() -> str:
    """Return the error that ends the program outside of runs, for the other processes; an empty text without any."""
    error = getattr(sys, "last_value", None)
    if error is None or _last_run_failed or is_about_lost_process(error):
        return ""
    described = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(":. ")
    return f"has left the program: {described}."


def _leave_job() -> None:
    """Close all trainers, and leave the job together with the other processes unless one has failed."""
    for trainer in list(_open):
        trainer.close()
    if not _job:
        return
    gc.collect()  # frees remains of DistributedDataParallel before its process group
    accelerator, ranks = _job.pop()
    failed = _last_run_failed or hasattr(sys, "last_type")  # set once the interpreter has printed an uncaught error
    if dist.is_available() and dist.is_initialized():
        reason = _uncaught_error() if failed else "has reached the end of its program."
        if not failed:
            try:
                ranks.barrier(_EXIT_TIMEOUT)
            except RuntimeError:  # another rank has failed or is still busy
                failed = True
        for observer in OBSERVERS:
            observer.end(reason)
        if failed and dist.get_backend() != "gloo":  # destroying a group of NCCL waits for ranks that wait for this one
            for tracker in accelerator.trackers:
                tracker.finish()
            return
    accelerator.end_training()
