"""The thread that watches a job through all its runs: it reports processes that wait for each other, and may end it."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytorch_accel_lite.extending import OpenTrainer
from pytorch_accel_lite.extension_tools.processes import ControlGroup, describe_call
from pytorch_accel_lite.extensions.hang_watch.waiting_threads import (
    is_own_collective,
    kind_of_wait,
    signature,
    stack_of,
    waits_for_others,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: Exit code of a program ended by a watch: EX_TEMPFAIL of sysexits.h, a failure after which a retry may succeed.
EXIT_CODE = 75
_LONGEST_INTERVAL = 4.0
_MOST_BYTES = 1 << 20  # maximum read and written by a waiting process between two checks
_MOST_CPU = 0.2  # maximum share of CPU time of a waiting thread
_PATIENCE = 5.0  # seconds to wait for the reason of a loss
_HINT = (
    " Those in the backward pass wait for gradients that another process does not have: of a step in which it skips "
    "its backward pass, or of parameters that its loss does not depend on. If the model uses different parts in "
    "different steps, pass find_unused_parameters=True to the trainer."
)


class _Place(NamedTuple):
    """The position of a process.

    Args:
        call: the current call, with the line
        waited: the seconds for which the process has waited for others without doing anything else
        kind: the kind of collective in which the process waits, if any
        is_own: whether the user's code itself called that collective
        runs: the numbers of the runs that the process is in
        begun: the number of the latest run that the process has begun
    """

    call: str
    waited: float
    kind: str
    is_own: bool
    runs: list[int]
    begun: int


class JobWatch(threading.Thread):
    """Checks regularly whether this process waits for others, and reports its position if another process asks.

    It uses no collectives, and costs a step nothing. A process that has waited long enough asks the others for their
    positions through the store of the job, and prints a report.

    Args:
        rank: the rank of this process
        processes: the host, the namespace of process ids and the process id of each rank
        store: the key-value store of the job, if any
        seconds: how long to wait before the first report; the time doubles with each further report

    Attributes:
        begun: the number of the run that this process began last; 0 before the first
    """

    def __init__(self, rank: int, processes: list[tuple[str, str, int]], store: Store | None, seconds: float) -> None:
        super().__init__(name="pytorch_accel_lite.watch", daemon=True)
        self.begun = 0
        self._rank = rank
        self._processes = processes
        self._store: Any = store  # None if the others cannot be reached
        self._seconds = seconds
        self._interval = min(seconds / 10, _LONGEST_INTERVAL)
        self._is_over = threading.Event()
        self._runs: list[tuple[int, weakref.ref[OpenTrainer]]] = []
        self._verdict = ""
        self._answered = 0
        self._next_report = seconds
        self._has_left = False
        self._is_served_by_first = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._was_reported = False
        self._last: tuple[object, float, float, int] | None = None
        self._since = time.monotonic()
        self.watch_this_thread()

    def watch_this_thread(self) -> None:
        """Watch the thread that calls this."""
        self._watched = threading.get_ident()
        self._watched_native = threading.get_native_id()

    def enter(self, number: int, trainer: OpenTrainer) -> None:
        """Note that a run begins. Its number is the same on all processes."""
        self.begun = number
        self._has_left = False
        ControlGroup.circumstances = ""
        self._runs.append((number, weakref.ref(trainer)))
        self.watch_this_thread()

    def leave(self, number: int, failed: bool = False, reason: str = "") -> None:
        """Note that a run has ended in this process, with a reason for the others if it failed here first."""
        self._runs = [run for run in self._runs if run[0] != number]
        if self._runs:  # outer runs continue
            return
        self._has_left = failed
        if reason:
            ControlGroup.circumstances = f", after it {reason}"
            self.note(reason)

    def note(self, reason: str) -> None:
        """Leave a note for processes that lose the connection to this process, or wait for it."""
        if self._store is not None:
            with suppress(RuntimeError):  # the process that serves the store has ended
                self._store.set(f"left/{self._rank}", json.dumps([self.begun, reason]))

    def _note_of(self, rank: int) -> tuple[int, str] | None:
        """Return the latest run that another process has left, and the reason; ``None`` if it has left no note."""
        key = f"left/{rank}"
        if not self._can_ask() or not self._store.check([key]):
            return None
        run, reason = json.loads(self._store.get(key))
        return run, reason

    def run(self) -> None:
        """Check until the watch is stopped."""
        while not self._is_over.wait(self._interval):
            with suppress(Exception):  # for example, the process of the store has ended
                self._check()

    def stop(self) -> None:
        """End the thread before the interpreter ends: it must not be in C++ code then."""
        self._is_over.set()
        self.join(4 * _LONGEST_INTERVAL)

    def _check(self) -> None:
        waited = self._find_waited()
        if not waited and self._was_reported:
            self._was_reported = False
            _print(f"Rank {self._rank} no longer waits for the other processes.")
        if not waited:
            self._next_report = self._seconds
        is_due = waited >= self._next_report
        if is_due:
            self._next_report = 2 * waited
            self._was_reported = True
        if self._store is None:
            if is_due:
                self._report(waited, {self._rank: self._place(waited)})
            return
        if (self._has_left and not waited) or not self._can_ask():  # torch prints errors if the store has ended
            return
        self._exit_if_ended()
        asked = self._store.add("asked", 0)
        if asked > self._answered:
            self._answer(asked, waited)
        elif is_due and self._store.add(f"{asked + 1}/opened", 1) == 1:  # this process is the first
            self._answer(self._store.add("asked", 1), waited)
            self._report(waited, self._ask(self._answered))

    def _can_ask(self) -> bool:
        """Whether there is a store, and the process that serves it has not ended."""
        return self._store is not None and not (self._rank and self._is_served_by_first and self._has_ended(0))

    def _find_waited(self) -> float:
        """Return how long the watched thread has waited at the same position, without computing or copying."""
        places, waits = signature(sys._current_frames().get(self._watched))
        now = time.monotonic()
        if not waits:
            self._last = None
            return 0.0
        cpu, transferred = _cpu_seconds(self._watched_native), _bytes_transferred()
        before, self._last = self._last, (places, now, cpu, transferred)
        computes = before is not None and cpu - before[2] > _MOST_CPU * (now - before[1])
        if before is None or before[0] != places or computes or transferred - before[3] > _MOST_BYTES:
            self._since = now
        return now - self._since

    def _place(self, waited: float) -> _Place:
        stack = stack_of(self._watched)
        waits = waits_for_others(stack)
        call = describe_call(stack)
        trainer = self._runs[-1][1]() if self._runs else None
        if trainer is not None and trainer.progress.epoch:
            call = f"epoch {trainer.progress.epoch}, step {trainer.progress.step}: {call}"
        kind, is_own = (kind_of_wait(stack), is_own_collective(stack)) if waits else ("", False)
        return _Place(call, waited if waits else 0.0, kind, is_own, [number for number, _ in self._runs], self.begun)

    def _answer(self, wave: int, waited: float) -> None:
        self._answered = wave
        if waited:  # one report is enough
            self._next_report = max(self._next_report, 2 * waited)
        self._store.set(f"{wave}/{self._rank}", json.dumps(self._place(waited)))

    def _ask(self, wave: int) -> dict[int, _Place]:
        """Return the positions of the processes that answer in time."""
        keys = {rank: f"{wave}/{rank}" for rank in range(len(self._processes))}
        deadline = time.monotonic() + 2 * self._interval + 2
        while time.monotonic() < deadline and not self._store.check([*keys.values()]):
            time.sleep(0.05)
        return {r: _Place(*json.loads(self._store.get(key))) for r, key in keys.items() if self._store.check([key])}

    def _report(self, waited: float, places: dict[int, _Place]) -> None:
        lines = [f"Rank {self._rank} has waited for the other processes for {waited:.0f} seconds:"]
        for rank in range(len(self._processes)):
            place = places.get(rank)
            waits = place is not None and place.waited
            lines.append(f"  rank {rank}{' waits' if waits else ''}, {place.call if place else self._silence(rank)}")
        verdict = self._find_verdict(places)
        if not verdict:
            _print("\n".join(lines))
            return
        if waited < 2 * self._seconds:
            _print("\n".join([*lines, f"{verdict} Unless that changes, the job ends in {self._seconds:.0f} seconds."]))
            return
        _print("\n".join([*lines, f"{verdict} The job ends with exit code {EXIT_CODE}."]))
        waiting = {rank: place.kind for rank, place in places.items() if place.waited}
        # A process that waits in an exchange gets an error once the connection to another process is closed.
        ending = [rank for rank, kind in waiting.items() if kind != "exchange"] or [*waiting]
        self._verdict = "\n".join([verdict, *lines[1:]])
        self._store.set(f"{self._answered}/end", json.dumps([ending, self._verdict]))
        if self._rank in ending:
            self._is_over.wait(self._interval + 1)  # lets the others read the verdict
            end_process()

    def _silence(self, rank: int) -> str:
        if self._store is None:
            return "which cannot be asked"
        if self._has_ended(rank):
            return "whose process has ended"
        note = self._note_of(rank)
        if note is not None:
            return f"which {note[1]}"
        return "which does not answer: native code keeps Python from running, or its process or machine is lost"

    def _find_verdict(self, places: dict[int, _Place]) -> str:
        """Return why the job is certainly stuck, or an empty string if it may continue."""
        waiting = {rank: place for rank, place in places.items() if place.waited >= self._seconds / 2}
        for rank, place in waiting.items():
            if not place.runs or place.is_own:
                continue
            ranks = range(len(self._processes))
            left = [other for other in ranks if self._has_left_run(other, places.get(other), place.runs[-1])]
            if left and all(other in left or other in waiting for other in ranks):  # all others have left or wait
                return f"Rank {_describe_ranks(left)} has left the run in which rank {rank} waits for it."
        kinds = {place.kind for place in waiting.values()}
        if len(waiting) < len(self._processes) or len(kinds) == 1:
            return ""
        return "All processes wait, but in different calls, so none can go on." + _HINT * ("backward" in kinds)

    def _has_left_run(self, rank: int, place: _Place | None, run: int) -> bool:
        if place is not None:
            return place.begun >= run and run not in place.runs
        note = self._note_of(rank)
        return note is not None and note[0] >= run

    def _exit_if_ended(self) -> None:
        """Exit if a report has ended the job."""
        key = f"{self._answered}/end"
        if self._answered and self._store.check([key]):
            ending, self._verdict = json.loads(self._store.get(key))
            if self._rank in ending:
                end_process()

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has certainly ended."""
        host, namespace, pid = self._processes[rank]
        if (host, namespace) != self._processes[self._rank][:2]:
            return False
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return Path("/proc/self").exists()
        except (OSError, IndexError):
            return False
        return state in "ZX"

    def find_loss(self) -> str:
        """Return which other processes are lost and, if known, why."""
        others = [rank for rank in range(len(self._processes)) if rank != self._rank]
        run = self._runs[-1][0] if self._runs else self.begun
        deadline = time.monotonic() + _PATIENCE
        while True:
            is_late = time.monotonic() > deadline
            ended = [rank for rank in others if self._has_ended(rank)]
            time.sleep(0.05)  # the last note may not have arrived yet
            if self._verdict:
                return self._verdict
            with suppress(RuntimeError):  # the process that serves the store has ended
                if self._can_ask():
                    self._exit_if_ended()
                notes = {rank: note for rank in others if (note := self._note_of(rank)) and note[0] >= run}
                if notes:
                    return " ".join(f"Rank {rank} {reason}" for rank, (_, reason) in notes.items())
            if ended or is_late:
                break
        if ended:
            process = f"The process of rank {_describe_ranks(ended)}"
            if not self._can_ask():  # what it has left in the store ended with it
                return f"{process} has ended. Its own output says why, unless it was killed."
            return f"{process} has ended without a word: it was killed, or called os._exit()."
        return f"See the output of the other processes: rank {_describe_ranks(others)}."


def _describe_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # the output may be closed
        print(text, file=sys.stderr, flush=True)


def end_process() -> None:
    """Exit at once, without joining the other threads, which hang."""
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(EXIT_CODE)


def _cpu_seconds(thread: int) -> float:
    """Return the CPU time of a thread, if the system reports it."""
    try:
        fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _bytes_transferred() -> int:
    """Return how much this process has read and written, if the system reports it."""
    try:
        return sum(map(int, re.findall(r"char: (\d+)", Path("/proc/self/io").read_text())))
    except OSError:
        return 0
