"""Jobs of several processes that stay alive and run one function after another, which saves the time of imports."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.launching import PATIENCE, EarlyFork, run_elastic
from tests.scripts import rank as rank_script


class Results(list[Any]):
    """What a function returned on each rank, in rank order.

    Args:
        by_rank: what the function returned on each rank
        output: what all ranks printed

    Attributes:
        output: what all ranks printed
    """

    def __init__(self, by_rank: list[Any], output: str) -> None:
        super().__init__(by_rank)
        self.output = output


def _launch(world_size: int, address: str) -> None:
    faulthandler.register(signal.SIGUSR2, sys.stderr)  # prints the stack of a job that hangs at its start
    run_elastic(world_size, rank_script.main, address)


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # not Linux, or the process has ended
        return []


class RankPool:
    """A job of torch's elastic launcher, whose ranks wait for functions to run (see tests/scripts/rank.py).

    Args:
        world_size: number of processes of the job
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._known: dict[Callable[[], Any], Results] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        self._log = folder / "output"
        self._log.touch()
        with Listener(str(folder / "socket"), "AF_UNIX", backlog=world_size) as listener:
            self._job = EarlyFork(partial(_launch, world_size, listener.address), self._log)
            self._pids = [self._job.pid]
            try:
                self._ranks = self._welcome(listener)
            except TimeoutError:
                printed = self._give_up(0)
                raise AssertionError(f"a job of {world_size} processes did not start:\n{printed}") from None
            except BaseException:
                self._give_up(0)
                raise
        self._pids.remove(self._job.pid)

    def _welcome(self, listener: Listener) -> list[Connection]:
        listener._listener._socket.settimeout(120)  # type: ignore[attr-defined]
        by_rank: dict[int, Connection] = {}
        for _ in range(self.world_size):
            connection = listener.accept()
            rank, world_size, pid = pickle.loads(connection.recv_bytes())
            assert world_size == self.world_size, f"rank {rank} sees {world_size} processes, not {self.world_size}"
            by_rank[rank] = connection
            self._pids.append(pid)
        return [by_rank[rank] for rank in range(self.world_size)]

    @property
    def is_usable(self) -> bool:
        """Whether all ranks are alive and idle."""
        return self._job.poll() is None and bool(self._ranks)

    def __call__(self, case: Callable[[], Any]) -> Results:
        """Return the results of a function without arguments on each rank, cached after the first call."""
        if case not in self._known:
            self._known[case] = self.run(case)
        return self._known[case]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE, **kwargs: Any) -> Results:
        """Run a function of a module on all ranks.

        Raises:
            AssertionError: with the traceback of a rank on which it failed; or with those of all ranks, when it is not
                done in time: the job is killed then
        """
        start = self._log.stat().st_size
        request = pickle.dumps((function.__module__, function.__qualname__, args, kwargs, [*warnings.filters]))
        try:
            replies = self._ask(request, timeout)
        except (AssertionError, EOFError, ConnectionError) as error:
            printed = self._give_up(start)
            raise AssertionError(f"{function.__qualname__}: {error!r}\n{printed}") from None
        except BaseException:  # such as pytest's timeout: the next function would get these replies
            self._give_up(start)
            raise
        in_order = [replies[rank] for rank in self._ranks]
        for rank, (_, failure) in enumerate(in_order):
            assert failure is None, f"{function.__qualname__} failed on rank {rank}:\n{failure}"
        return Results([value for value, _ in in_order], self._printed(start))

    def _ask(self, request: bytes, timeout: float) -> dict[Connection, tuple[Any, str | None]]:
        for rank in self._ranks:
            rank.send_bytes(request)
        replies: dict[Connection, tuple[Any, str | None]] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < self.world_size:
            ready = wait([rank for rank in self._ranks if rank not in replies], deadline - time.monotonic())
            assert ready, f"not done within {timeout} seconds"
            replies |= {rank: pickle.loads(rank.recv_bytes()) for rank in ready}
        return replies

    def _printed(self, start: int) -> str:
        with self._log.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    def _give_up(self, start: int) -> str:
        """Kill the job, and return its output since that had a given size."""
        self._kill()
        printed = self._printed(start)
        self._folder.cleanup()
        return printed

    def _kill(self) -> None:
        self._pids = [*{*self._pids, *_children_of(self._job.pid)}]  # includes ranks that have not reported yet
        self._signal(signal.SIGUSR2)  # prints the stacks of their threads
        time.sleep(1)
        self._job.kill()
        self._job.wait()
        self._signal(signal.SIGKILL)
        self._ranks = []

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> int:
        """Shut the ranks down, and return the exit code of the job."""
        for rank in self._ranks:
            rank.send_bytes(pickle.dumps(None))
        self._ranks = []
        try:
            return self._job.wait()
        finally:
            self._job.kill()
            self._folder.cleanup()
