"""Checks that all processes see the same disk, which may show a new file late."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pytorch_accel_lite.distributed import Ranks

T = TypeVar("T")

_SECONDS_TO_APPEAR = 3.0  # time that a file may take to appear on a shared disk


def check_is_shared(directory: Path, name: str, ranks: Ranks) -> None:
    """Check that all ranks see the same directory, in which each will write, and create it. All ranks take part.

    Args:
        name: what to call it in the error

    Raises:
        OSError: on all ranks, if they see different directories
    """
    if ranks.world_size == 1:
        return

    def create_mark() -> str:
        name = f".{secrets.token_hex(4)}.tmp"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
        return name

    mark = directory / ranks.result_of_first(create_mark)
    try:
        ranks.run_together(lambda: require_shared(mark, name))
    finally:
        if ranks.rank == 0:
            mark.unlink(missing_ok=True)


def require_shared(path: Path, name: str) -> None:
    """Wait until a path appears that the first process has created in a shared directory, perhaps on another machine.

    Args:
        name: what to call the directory in the error

    Raises:
        FileNotFoundError: if the path does not appear
    """
    end = time.monotonic() + _SECONDS_TO_APPEAR
    while not path.exists():
        if time.monotonic() > end:
            raise FileNotFoundError(
                f"{name} is not the directory of the first process on {socket.gethostname()}, in {os.getcwd()}, but "
                "every process writes its part there. Pass the absolute path of a directory that all processes share; "
                "training states may also be at a URL, such as 's3://bucket/run'."
            )
        time.sleep(0.05)


def check_on_all_ranks(ranks: Ranks, read: Callable[[], T]) -> T:
    """Return what this process reads. Call it on every process.

    Raises:
        TypeError: on all processes, if any raises it; likewise ``ValueError`` and the errors derived from it
    """
    results: list[T] = []

    def find_problem() -> TypeError | ValueError | None:
        try:
            results.append(read())
        except (TypeError, ValueError) as error:
            return error.with_traceback(None)
        return None

    for problem in ranks.run_together(find_problem):
        if problem is not None:
            raise problem
    return results[0]
