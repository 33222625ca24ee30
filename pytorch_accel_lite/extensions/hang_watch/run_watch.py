"""The thread that watches one run, for ``HangWatchCallback``: if no step ends, it reports where each process is."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from pytorch_accel_lite.extending import Ranks
from pytorch_accel_lite.extension_tools.processes import innermost_function
from pytorch_accel_lite.extensions.hang_watch.job_watch import EXIT_CODE, end_process
from pytorch_accel_lite.extensions.hang_watch.process_groups import GroupTimeouts, connect_to_store
from pytorch_accel_lite.extensions.hang_watch.waiting_threads import stack_of, waits_for_others

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LONGEST_INTERVAL = 5.0
_stores: Any = dist  # its type stubs lack the stores


_SILENCE = "does not answer: its process has ended, or native code keeps Python from running"


class Progressed(NamedTuple):
    """The progress of a process: its number of steps and ends of epochs, its epoch, and its step."""

    events: int
    epoch: int
    step: int


class StackPosition(NamedTuple):
    """The position of a process.

    Args:
        epoch: the epoch of the process
        step: the step within the epoch
        waits: whether it seems to wait for other processes
        function: its innermost function, in a few words
        stack: its stack, as Python prints it
    """

    epoch: int
    step: int
    waits: bool
    function: str
    stack: str


class RunWatch(threading.Thread):
    """Checks regularly whether a run makes progress, on one process or several.

    A process without progress for half of the time keeps its position in the store. The first one to exceed the time
    prints a report on all processes. The store holds the number of reports so far.

    Args:
        seconds: how long a run may make no progress
        ranks: the processes of the job
        progress: returns the progress of this process; called in the thread
        name: the prefix of the watch's keys in the store of the job

    Attributes:
        may_end: whether a report may end the job
    """

    def __init__(self, seconds: float, ranks: Ranks, progress: Callable[[], Progressed], name: str) -> None:
        super().__init__(name="HangWatchCallback", daemon=True)
        self.may_end = False
        self._seconds = seconds
        self._progress = progress
        self._rank, self._world_size = ranks.rank, ranks.world_size
        store = connect_to_store(f"hang_watch/{name}")
        self._is_shared = store is not None
        self._store: Store = store or _stores.HashStore()
        self._timeouts = GroupTimeouts()
        self._watched = threading.get_ident()
        self._interval = min(seconds / 10, _LONGEST_INTERVAL)
        self._is_over = threading.Event()
        self._steps = 0
        self._since = time.monotonic()
        self._reports = 0
        self._is_reported = self._is_position_stored = False

    def run(self) -> None:
        """Check until the watch is stopped."""
        while not self._is_over.wait(self._interval):
            _dump_stacks_unless_called_again(self._seconds, self.may_end)
            try:
                self._check()
            except RuntimeError:  # the process that serves the store has ended
                self._store, self._is_shared = _stores.HashStore(), False

    def allow_ending(self) -> None:
        """From now on, a report may end the job. Lower the timeouts of collectives, for processes that cannot exit."""
        if not self.may_end:
            self.may_end = True
            self._timeouts.set(2 * self._seconds + 6 * _LONGEST_INTERVAL)

    def stop(self, reason: str) -> None:
        """End the watch of this process.

        Args:
            reason: the reason, for reports of processes that are still in the run
        """
        self._timeouts.restore()
        self._is_over.set()
        self.join(2 * _LONGEST_INTERVAL)
        faulthandler.cancel_dump_traceback_later()
        with suppress(RuntimeError):  # the process that serves the store has ended
            self._note_progress()
            if reason:
                self._store.set(f"left/{self._rank}", reason)

    def _check(self) -> None:
        self._note_progress()
        waited = time.monotonic() - self._since
        if waited >= self._seconds / 2:
            self._store.set(str(self._rank), json.dumps(self._position()))
            self._is_position_stored = True
        reports = self._store.add("reports", 0)
        if reports > self._reports:
            self._reports = reports
            self._is_reported = True
            if self.may_end:
                with suppress(RuntimeError):  # the reporting process may serve the store, and have ended
                    self._store.wait([f"{reports}/printed"], timedelta(seconds=4 * _LONGEST_INTERVAL))
                end_process()
        elif waited >= self._seconds and not self._is_reported:
            self._is_reported = True
            if self._store.add(f"{reports + 1}/opened", 1) == 1:  # this process is the first
                self._reports = self._store.add("reports", 1)
                self._report()

    def _note_progress(self) -> None:
        steps = self._progress().events
        if self._steps == steps:
            return
        now = time.monotonic()
        if self._is_reported:
            _print(f"Rank {self._rank} makes progress again after {now - self._since:.0f} seconds.")
        self._steps = steps
        self._since = now
        if self._is_position_stored:
            self._store.delete_key(str(self._rank))
        self._is_reported = self._is_position_stored = False

    def _position(self) -> StackPosition:
        stack = stack_of(self._watched)
        progress = self._progress()
        printed = "".join(traceback.format_list(stack))
        return StackPosition(progress.epoch, progress.step, waits_for_others(stack), innermost_function(stack), printed)

    def _report(self) -> None:
        ranks = range(self._world_size if self._is_shared else 1)
        deadline = time.monotonic() + 2 * self._interval + 2
        while time.monotonic() < deadline and not self._store.check(list(map(str, ranks))):
            time.sleep(0.05)
        positions, silent = {}, {}
        for rank in ranks:
            if self._store.check([f"left/{rank}"]):
                silent[rank] = self._store.get(f"left/{rank}").decode()
            elif self._store.check([str(rank)]):
                positions[rank] = StackPosition(*json.loads(self._store.get(str(rank))))
            else:
                silent[rank] = _SILENCE
        _print(describe_positions(self._seconds, positions, silent))
        if self.may_end:
            _print(f"The job ends with exit code {EXIT_CODE}.")
            self._store.set(f"{self._reports}/printed", "")
            time.sleep(1)  # this process may serve the store: lets the others read that
            end_process()


def describe_positions(seconds: float, positions: dict[int, StackPosition], silent: dict[int, str]) -> str:
    """Return a report: a line for all processes at the same position, then the stacks.

    Processes that are behind, and processes that do not wait for others, come first.

    Args:
        positions: the positions of processes by rank
        silent: why other processes have no position, by rank
    """
    by_position: dict[tuple[int, int, bool, str], list[int]] = defaultdict(list)
    for rank, position in sorted(positions.items()):
        by_position[position[:4]].append(rank)
    groups = sorted(by_position.items(), key=lambda item: (item[0][:3], len(item[1])))
    lines = [f"No progress for {seconds:g} seconds."]
    lines += [f"  rank {rank} {reason}" for rank, reason in sorted(silent.items())]
    for (epoch, step, _, function), ranks in groups:
        label = "ranks" if len(ranks) > 1 else "rank"
        lines.append(f"  {label} {', '.join(map(str, ranks))}, epoch {epoch}, step {step}: {function}")
    for _, ranks in groups:
        lines += [f"Stack of rank {ranks[0]}:", positions[ranks[0]].stack.rstrip("\n")]
    return "\n".join(lines)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _dump_stacks_unless_called_again(seconds: float, end: bool) -> None:
    """Have faulthandler print the stacks if native code holds the GIL, so that this thread cannot run."""
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):  # not a real file
            faulthandler.dump_traceback_later(seconds + _LONGEST_INTERVAL, exit=end, file=sys.__stderr__)
