"""The process that starts those of a job, and lets the others go on when one of them ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pytorch_accel_lite.extensions.takeover.channel import Channel
from pytorch_accel_lite.extensions.takeover.job_store import Generation, JobStore
from pytorch_accel_lite.extensions.takeover.silent_processes import Progress, find_silent

_TICK_MS = 20
_SECONDS_TO_DIE = 1.0  # in which the end of a process follows the error that the others have had of it
_SECONDS_TO_END = 30.0  # after a signal
_SECONDS_BETWEEN_LOOKS = 0.5
_FORWARDED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP


@dataclass(eq=False)
class Process:
    """A process of the job.

    :ivar number: counted from 0
    :ivar id: of the system; 0 until it is known
    :ivar is_member: whether it is in a generation
    :ivar progress: how far it has got
    """

    number: int
    id: int = 0
    is_member: bool = False
    progress: Progress | None = None


class Supervisor:
    """Starts the processes of a job and supervises them.

    :param program: the arguments of Python: a script, or ``-m`` and a module, and the arguments of that
    :param processes: how many to start
    :param replaces: whether another process is started for each that is lost
    :param min_processes: end the job when fewer are left
    :param max_failures: end the job when more processes have failed
    :param patience: seconds after which a process is ended for which others wait, and which does nothing
    """

    def __init__(
        self,
        program: Sequence[str],
        processes: int,
        replaces: bool = False,
        min_processes: int = 1,
        max_failures: int | None = None,
        patience: float = 60.0,
    ) -> None:
        self._program = list(program)
        self._replaces = replaces
        self._min_processes = min_processes
        self._max_failures = max_failures
        self._patience = patience
        self._size = processes
        self._processes: dict[int, Process] = {}
        self._generation = Generation(0, [])
        self._started = 0
        self._failures = 0
        self._code = 0
        self._is_ending = False
        self._next_look = 0.0
        self._stop: tuple[float, int] | None = None  # when a signal has asked for the end, and which
        self._asked = 0
        self._asked_at = 0.0
        self._changed_at: tuple[float, str] | None = None  # when a process was lost, until the others go on

    def run(self) -> int:
        """Run the job and return its exit code."""
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        self._begin()
        while self._processes:
            for _ in self._poll.poll(_TICK_MS):
                self._listen()
            self._look()
        return self._code

    # -------------------------------------------------------------------------------- starting processes

    def _begin(self) -> None:
        own, other = socket.socketpair()
        command = [sys.executable, "-m", "pytorch_accel_lite.extensions.takeover.nursery", str(other.fileno())]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self._nursery = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment, start_new_session=True)
        other.close()
        self._channel = Channel(own)
        self._store = JobStore.create()
        self._poll = select.poll()
        self._poll.register(self._channel, select.POLLIN)
        for _ in range(self._size):
            self._start(comes_later=False)
        self._publish([*self._processes])

    def _start(self, comes_later: bool) -> None:
        number, self._started = self._started, self._started + 1
        self._processes[number] = Process(number)
        port, program = self._store.port, self._program
        self._channel.send(number=number, port=port, comes_later=comes_later, program=program)

    def _listen(self) -> None:
        """Read what the nursery says."""
        messages = self._channel.receive()
        if messages is None:
            _say("the process that starts the others has ended, so the job cannot go on.")
            self._code = self._code or 1
            self._processes.clear()
            return
        for message in messages:
            number = message["number"]
            if "code" in message:
                self._end(self._processes.pop(number), message["code"])
                continue
            self._processes[number].id = message["process"]
            if self._stop is not None:
                self._kill(self._processes[number], self._stop[1])

    # -------------------------------------------------------------------------------- when processes end

    def _end(self, process: Process, code: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # what it has started itself, such as workers
            os.killpg(process.id, signal.SIGKILL)
        if code == 0 or self._stop is not None:
            self._is_ending = True
            self._code = self._code or _as_exit_code(code)
            self._store.say("ending")
            self._end_newcomers()
            return
        if self._is_ending and not process.is_member:
            return
        self._failures += 1
        self._lose(process, code)

    def _lose(self, process: Process, code: int) -> None:
        """Let the others go on without a process, or end the job."""
        if self._store.have_arrived(self._generation):
            self._settle()
        rank = self._rank_of(process)
        reason = self._store.said(f"failed/{process.number}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        what = f"{rank} {how}{f' ({reason})' if reason else ''}"
        members = [number for number in self._generation.members if number in self._processes]
        left = sum(self._processes[number].is_member for number in members)
        why = ""
        if self._is_ending:
            why = "others have reached the end of the program"
        elif self._max_failures is not None and self._failures > self._max_failures:
            why = f"{self._failures} processes have failed (--max-failures {self._max_failures})"
        elif left < self._min_processes:
            why = f"{left} processes are left (--min-processes {self._min_processes})" if left else "none is left"
        if why:
            _say(f"{what}. The job ends: {why}.")
            self._code = self._code or _as_exit_code(code)
            self._is_ending = True
            for other in self._processes.values():
                self._kill(other, signal.SIGKILL)
            return
        if process.number in self._generation.members:
            self._publish([number for number in members if self._has_settled(number)])
        self._note_change(what)
        if self._replaces and self._store.said("closed") is None:
            self._start(comes_later=True)

    def _end_newcomers(self) -> None:
        for other in self._processes.values():
            if not other.is_member:
                self._kill(other, signal.SIGKILL)

    def _kill(self, process: Process, number: int) -> None:
        if process.id:
            with suppress(ProcessLookupError):
                os.kill(process.id, number)

    def _forward(self, number: int, frame: object) -> None:
        """Pass a signal on to all processes. What follows it is the end of the job."""
        ends = number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if ends and self._stop is None:
            self._stop = time.monotonic(), number
        for process in list(self._processes.values()):
            self._kill(process, number if process.is_member or not ends else signal.SIGKILL)

    # -------------------------------------------------------------------------------- generations

    def _publish(self, members: Sequence[int], came: Sequence[int] = ()) -> None:
        self._generation = Generation(self._generation.number + 1, [*members, *came], list(came))
        self._store.publish(self._generation)
        self._asked, self._asked_at = self._store.count("asked"), 0.0
        for number in members:
            self._processes[number].is_member = True

    def _has_settled(self, number: int) -> bool:
        """Whether a process has been a member before, rather than one that is yet to come in."""
        return self._processes[number].is_member

    def _rank_of(self, process: Process) -> str:
        members = self._generation.members
        return f"rank {members.index(process.number)}" if process.number in members else "a new process"

    def _look(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if self._stop is not None and now - self._stop[0] > _SECONDS_TO_END:
            for process in self._processes.values():
                self._kill(process, signal.SIGKILL)
        if self._is_ending or self._stop is not None:
            return
        if self._changed_at is not None and self._store.have_arrived(self._generation) and self._generation.members:
            begin, what = self._changed_at
            self._changed_at = None
            count = len(self._generation.members)
            _say(f"{what}. {_counted(count)} after {now - begin:.2f} s.")
        if self._store.have_arrived(self._generation):
            self._settle()
            self._let_in()
        self._heed_questions(now)
        if self._patience and now >= self._next_look:
            self._next_look = now + _SECONDS_BETWEEN_LOOKS
            self._end_silent(now)

    def _end_silent(self, now: float) -> None:
        """Kill the processes that do nothing while others wait for them."""
        generation = self._generation
        are_all_there = self._store.have_arrived(generation)
        progress: dict[int, Progress] = {}
        for number in generation.members:
            process = self._processes.get(number)
            if process is None or not process.id:
                continue
            if process.progress is None:
                process.progress = Progress(process.id, now)
            process.progress.note(self._store.said(f"progress/{number}"), now)
            if are_all_there or not self._store.has_arrived(generation, number):
                progress[number] = process.progress
        for number in find_silent(progress, now, self._patience, are_all_there):
            self._store.say(f"failed/{number}", f"it did nothing for {self._patience:.0f} s while others waited for it")
            self._kill(self._processes[number], signal.SIGKILL)

    def _settle(self) -> None:
        """Count those that have come in among the members: all have arrived."""
        for number in self._generation.members:
            if number in self._processes:
                self._processes[number].is_member = True

    def _let_in(self) -> None:
        """Begin a generation with new processes that are ready."""
        members = self._generation.members
        ready = [n for n in self._processes if n not in members and self._store.said(f"ready/{n}") is not None]
        if ready and self._store.said("closed") is None:
            self._publish(members, ready)
            self._note_change(f"{len(ready)} new process{'es' * (len(ready) > 1)} joined")

    def _note_change(self, what: str) -> None:
        """Note what has happened, to be said once the others go on."""
        if self._changed_at is not None:
            _say(f"{self._changed_at[1]}.")
        self._changed_at = time.monotonic(), what

    def _heed_questions(self, now: float) -> None:
        """Begin a generation if processes have lost a connection although none has ended."""
        if self._store.count("asked") <= self._asked:
            return
        self._asked_at = self._asked_at or now
        if now - self._asked_at > _SECONDS_TO_DIE:
            self._publish([number for number in self._generation.members if number in self._processes])


def _as_exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _counted(count: int) -> str:
    return "One process continued" if count == 1 else f"{count} processes continued"


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
