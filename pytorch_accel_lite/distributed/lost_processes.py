"""Errors about other processes: one has left the job, or does not take part in a call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pytorch_accel_lite.distributed.control_group import OtherCallError
from pytorch_accel_lite.distributed.job_observers_seam import OBSERVERS
from pytorch_accel_lite.distributed.ranks import Ranks

_LOST = re.compile(r"gloo.*((closed|reset) by peer|Broken pipe)|remote process exited|ncclRemoteError", re.DOTALL)

#: Of waiting too long, or, with gloo, of a message of another call.
_WAITED = re.compile(r"timed out|timeout|op\.preamble|mismatch between collectives|monitoredBarrier", re.IGNORECASE)


class ProcessLostError(RuntimeError):
    """Another process has left the job. The message says which process and, if known, why."""


def is_about_lost_process(error: BaseException) -> bool:
    """Whether an error of torch is about the connection to another process that has failed or was killed."""
    return isinstance(error, ProcessLostError) or bool(_LOST.search(str(error)))


@contextmanager
def naming_call(ranks: Ranks, call: str = "") -> Iterator[None]:
    """Within a block, replace an error about a lost connection by an error that names the other process and the reason.

    Args:
        call: the user's call, named in the error if the others do not take part in it within the group's time limit
    """
    try:
        yield
    except (OtherCallError, ProcessLostError):
        raise
    except RuntimeError as error:
        if ranks.world_size == 1:
            raise
        rank = ranks.everyone.rank
        if is_about_lost_process(error):
            what = f"Rank {rank} cannot go on, because another process has left the job."
            causes = [cause for observer in OBSERVERS if (cause := observer.find_loss())]
            raise ProcessLostError(" ".join([what, *causes])) from error
        if not call or not _WAITED.search(str(error)):
            raise
        raise RuntimeError(
            f"{call} on rank {rank} waits for the other ranks, but one of them has not called it, or has failed. Call "
            f"it on every process, even if only one uses the results. ({error})"
        ) from error
