"""The cores of this machine that a process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_per_process(processes: int) -> int:
    """Return the number of cores of this machine available to each process, at least one.

    Args:
        processes: number of processes in the job, assumed to be on this machine unless the launcher says otherwise
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return max(available_cores() // max(local_processes, 1), 1)
