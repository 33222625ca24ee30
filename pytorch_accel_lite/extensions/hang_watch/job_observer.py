"""Connects ``JobWatch`` to trainers: starts it with the first one, reports runs to it, stops it with the job."""

from __future__ import annotations

import os
import socket
import threading
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pytorch_accel_lite.extending import OpenTrainer, ProcessLostError, Ranks
from pytorch_accel_lite.extension_tools.processes import describe_frame, is_library_frame
from pytorch_accel_lite.extensions.hang_watch.job_watch import JobWatch
from pytorch_accel_lite.extensions.hang_watch.process_groups import connect_to_store

_VARIABLE = "PT_ACC_HANG_SECONDS"
_SECONDS = 40.0  # seconds of waiting before the first report


class JobObserver:
    """Owns the ``JobWatch`` of this process, if its job has several processes."""

    def __init__(self) -> None:
        self._watch: JobWatch | None = None
        self._job: dist.ProcessGroup | None = None

    def begin(self, ranks: Ranks) -> None:
        """Start the watch of a job, if it has none yet. Call it on every process."""
        if self._job is dist.group.WORLD:
            return
        self.end("")
        seconds = _chosen_seconds()
        namespace = os.readlink("/proc/self/ns/pid") if os.path.islink("/proc/self/ns/pid") else ""
        gathered = ranks.all_gather_object((uuid.uuid4().hex, (socket.gethostname(), namespace, os.getpid())))
        self._job = dist.group.WORLD
        store = connect_to_store(f"watch/{gathered[0][0]}")
        self._watch = JobWatch(ranks.rank, [process for _, process in gathered], store, seconds or _SECONDS)
        if seconds:
            self._watch.start()

    @contextmanager
    def observing(self, trainer: OpenTrainer) -> Iterator[None]:
        """Report a run to the watch for the duration of a block, on every process."""
        watch = self._watch if trainer.ranks.world_size > 1 else None
        if watch is None:
            yield
            return
        number = int(trainer.ranks.max([watch.begun])[0]) + 1
        watch.enter(number, trainer)
        try:
            yield
        except ProcessLostError:
            watch.leave(number, failed=True)
            raise
        except BaseException as error:
            watch.leave(number, failed=True, reason=f"has left the run: {_describe(error)}.")
            raise
        else:
            watch.leave(number)

    def find_loss(self) -> str:
        """Return which other processes are lost and, if known, why; an empty string without a watch."""
        return "" if self._watch is None else self._watch.find_loss()

    def end(self, reason: str) -> None:
        """Stop the watch of this process. Other processes that still wait for it report the reason."""
        if self._watch is not None:
            if reason:
                self._watch.note(reason)
            if self._watch.is_alive():
                self._watch.stop()
        self._watch = self._job = None


def _chosen_seconds() -> float:
    chosen = os.environ.get(_VARIABLE)
    try:
        seconds = _SECONDS if chosen is None else float(chosen)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"{_VARIABLE}={chosen!r} must be a number of seconds, or 0 for no reports.")
    return seconds


def _describe(error: BaseException) -> str:
    text = str(error).partition("\n")[0].rstrip(".")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library_frame(frame)]
    place = f", in {describe_frame(own[-1])}" if own else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"
