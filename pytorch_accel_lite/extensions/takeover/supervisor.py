"""The supervisor of a job: it starts processes, notices those that end or get stuck, and begins new generations."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from pytorch_accel_lite.extensions.takeover.job_store import Generation, JobStore, Key
from pytorch_accel_lite.extensions.takeover.json_channel import SECONDS_BETWEEN_BEATS, Channel
from pytorch_accel_lite.extensions.takeover.stuck_processes import Liveness, find_stuck
from pytorch_accel_lite.extensions.takeover.worker import Order

_TICK_MS = 20  # while work is pending
_LONG_TICK_MS = 250
_SECONDS_TO_DIE = 1.0  # between a connection error and the exit of the process that caused it
_SECONDS_TO_END = 30.0  # for processes to exit after a signal
_SECONDS_BETWEEN_CHECKS = 0.5
_FORWARDED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP
_LOCAL = "127.0.0.1"


@dataclass(eq=False)
class Machine:
    """A machine of the job, or a part of one: the processes of one ``launch --join``.

    Attributes:
        number: the number of the machine, counted from 0
        channel: the connection to the machine's fork server
        host: the address of the supervisor, as seen from there
        is_local: whether this is the supervisor's own machine
        heard_at: when the last message or heartbeat arrived
        name: the name that the fork server reports, for messages; empty until then
    """

    number: int
    channel: Channel
    host: str
    is_local: bool
    heard_at: float
    name: str = ""


@dataclass(eq=False)
class Process:
    """A process of the job.

    Attributes:
        number: the number of the process, counted from 0
        machine: the machine on which the process runs
        is_member: whether the process belongs to a generation
        progress: the liveness of the process; ``None`` before its machine has started it
    """

    number: int
    machine: Machine
    is_member: bool = False
    progress: Liveness | None = None


class Supervisor:
    """Starts the processes of a job and supervises them.

    Args:
        program: the arguments of Python: a script, or ``-m`` and a module, and the arguments of that
        processes: how many to start on this machine
        begins_with: how many processes have to join, on all machines together, before the job begins
        address: the host and the port at which other machines may join
        replaces: whether a new process is started for each lost one
        min_processes: end the job when fewer processes are left
        max_failures: end the job when more processes have failed
        patience: seconds after which a process that is stuck while others wait for it is killed, and a machine without
            heartbeats is considered lost
    """

    def __init__(
        self,
        program: Sequence[str],
        processes: int,
        begins_with: int | None = None,
        address: tuple[str, int] | None = None,
        replaces: bool = False,
        min_processes: int = 1,
        max_failures: int | None = None,
        patience: float = 60.0,
    ) -> None:
        self._program = list(program)
        self._size = processes
        self._begins_with = processes if begins_with is None else begins_with
        self._address = address
        self._replaces = replaces
        self._min_processes = min_processes
        self._max_failures = max_failures
        self._patience = patience
        self._store = JobStore.create()
        self._poll = select.poll()
        self._listener: socket.socket | None = None  # to which other machines connect
        self._signal_pipe = -1  # to which a signal writes, to wake the supervisor
        self._fork_server: subprocess.Popen[bytes] | None = None  # the one on this machine
        self._machines: dict[int, Machine] = {}  # by the descriptors of their channels
        self._processes: dict[int, Process] = {}
        self._generation = Generation(0, [])
        self._are_there = False
        self._started = 0
        self._joined = 0
        self._failures = 0
        self._code = 0
        self._is_ending = False
        self._next_check = self._next_beat = 0.0
        self._signals: list[int] = []
        self._stop: tuple[float, int] | None = None  # when a signal ended the job, and its number
        self._connections_failed_at = 0.0
        self._change: tuple[float, str] | None = (
            None  # when a process was lost, and its description, until the others continue
        )

    def run(self) -> int:
        """Run the job and return its exit code."""
        self._begin()
        while self._processes or not (self._generation.number or self._is_ending or self._stop):
            for descriptor, _ in self._poll.poll(_TICK_MS if self._is_busy() else _LONG_TICK_MS):
                self._handle(descriptor)
            self._check()
        for machine in self._machines.values():
            machine.channel.send(code=self._code)
        return self._code

    # -------------------------------------------------------------------------------- starting processes

    def _begin(self) -> None:
        self._listen_to_signals()
        if self._replaces or self._address is not None:
            self._store.put(Key.OPEN)
        if self._address is not None:
            self._listener = socket.create_server(self._address)
            self._poll.register(self._listener, select.POLLIN)
            host, port = self._listener.getsockname()[:2]
            _log(f"others can join: python -m pytorch_accel_lite launch --join {host}:{port} --processes N")
        if self._size:
            machine = self._add_machine(self._start_fork_server(), self._own_host, is_local=True)
            self._start(machine, self._size)

    def _listen_to_signals(self) -> None:
        self._signal_pipe, signals = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        self._poll.register(self._signal_pipe, select.POLLIN)
        for number in _FORWARDED:
            signal.signal(number, lambda number, frame: self._signals.append(number))

    @property
    def _own_host(self) -> str:
        """The address of the supervisor for the processes on its machine."""
        return self._address[0] if self._address is not None and self._address[0] not in ("", "0.0.0.0") else _LOCAL

    def _start_fork_server(self) -> Channel:
        own, other = socket.socketpair()
        command = [sys.executable, "-m", "pytorch_accel_lite.extensions.takeover.fork_server", str(other.fileno())]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self._fork_server = subprocess.Popen(
            command, pass_fds=[other.fileno()], env=environment, start_new_session=True
        )
        other.close()
        return Channel(own)

    def _add_machine(self, channel: Channel, host: str, is_local: bool) -> Machine:
        machine = Machine(self._joined, channel, host, is_local, time.monotonic())
        self._joined += 1
        self._machines[channel.fileno()] = machine
        self._poll.register(channel, select.POLLIN)
        if self._patience and not is_local:
            machine.channel.send(lease=self._patience / 2)
        return machine

    def _start(self, machine: Machine, count: int = 1) -> None:
        """Start processes on a machine, and begin the job once there are enough."""
        for _ in range(count):
            number, self._started = self._started, self._started + 1
            self._processes[number] = Process(number, machine)
            comes_later = self._generation.number > 0
            machine.channel.send(**asdict(Order(number, machine.host, self._store.port, comes_later, self._program)))
        if not self._generation.number and len(self._processes) >= self._begins_with:
            for process in self._processes.values():  # which may have been idle until now
                process.progress = None
            self._publish([*self._processes])

    def _handle(self, descriptor: int) -> None:
        """Handle input on a descriptor: messages, the connection of a new machine, or the wake-up of a signal."""
        if descriptor == self._signal_pipe:
            os.read(descriptor, 1 << 10)
            return
        if self._listener is not None and descriptor == self._listener.fileno():
            connection, _ = self._listener.accept()
            self._add_machine(Channel(connection), connection.getsockname()[0], is_local=False)
            return
        machine = self._machines[descriptor]
        for message in self._receive(machine):
            if (process := self._processes.pop(message.get("ended", -1), None)) is not None:
                self._end(process, message["code"])
            elif "processes" in message:
                machine.name = str(message["name"])
                self._start(machine, int(message["processes"]))
            for number, seconds in message.get("computed", {}).items():
                if (computing := self._processes.get(int(number))) is not None:
                    computing.progress = computing.progress or Liveness(time.monotonic())
                    computing.progress.computed = seconds

    def _receive(self, machine: Machine) -> list[dict[str, Any]]:
        """Return the messages of a machine, or continue without it if it has closed its connection."""
        try:
            messages = machine.channel.receive()
        except ConnectionResetError:
            messages = None
        except OSError:  # the network is cut: its processes run until they are killed for lack of heartbeats
            if self._patience and not machine.is_local:
                self._poll.unregister(machine.channel)
                return []
            messages = None
        if messages is None:
            self._lose_machine(machine, "has left")
            return []
        machine.heard_at = time.monotonic()
        return messages

    # -------------------------------------------------------------------------------- when processes end

    def _lose_machine(self, machine: Machine, how: str) -> None:
        """Continue without a machine and its processes."""
        with suppress(KeyError):  # unregistered already if its connection has failed
            self._poll.unregister(machine.channel)
        del self._machines[machine.channel.fileno()]
        machine.channel.close()
        lost = [process for process in self._processes.values() if process.machine is machine]
        if machine.is_local and not self._is_ending:
            _log("the process that starts the others has ended, so the job cannot go on.")
            self._code, self._is_ending = self._code or 1, True
            self._processes.clear()
        for process in lost:
            self._processes.pop(process.number, None)
        if lost and not self._is_ending and self._stop is None:
            self._lose(lost, 1, f"{', '.join(map(self._rank_of, lost))} on {machine.name}, which {how}")

    def _end(self, process: Process, code: int) -> None:
        if code == 0 and not process.is_member and process.number not in self._generation.members:
            return  # a newcomer that was too late
        if code == 0 or self._stop is not None:
            self._is_ending = True
            self._code = self._code or _as_exit_code(code)
            self._store.put(Key.ENDING)
            self._end_newcomers()
            return
        if self._is_ending and not process.is_member:
            return
        reason = self._store.get(Key.FAILED, process.number)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        self._lose([process], code, f"{self._rank_of(process)} {how}{f' ({reason})' if reason else ''}")

    def _lose(self, processes: Sequence[Process], code: int, what: str) -> None:
        """Continue without some processes, or end the job."""
        if not self._generation.number and self._address is not None:  # more processes may still join
            _log(f"{what}.")
            return
        if self._have_arrived():
            self._count_newcomers()
        self._failures += len(processes)
        members = [number for number in self._generation.members if number in self._processes]
        left = sum(self._processes[number].is_member for number in members)
        if why := self._why_to_end(left):
            _log(f"{what}. The job ends: {why}.")
            self._code = self._code or _as_exit_code(code)
            self._is_ending = True
            self._kill(self._processes.values(), signal.SIGKILL)
            return
        if any(process.number in self._generation.members for process in processes):
            self._publish_members()
        self._note_change(what)
        for process in processes:
            if self._replaces and process.machine.channel.is_open:
                self._start(process.machine)

    def _why_to_end(self, left: int) -> str:
        """Return why the job has to end with this many members left, or an empty string if it continues."""
        if self._is_ending:
            return "others have reached the end of the program"
        if self._max_failures is not None and self._failures > self._max_failures:
            return f"{self._failures} processes have failed (--max-failures {self._max_failures})"
        if left < self._min_processes:
            return f"{left} processes are left (--min-processes {self._min_processes})" if left else "none is left"
        return ""

    def _end_newcomers(self) -> None:
        self._kill([other for other in self._processes.values() if not other.is_member], signal.SIGKILL)

    def _kill(self, processes: Iterable[Process], number: int) -> None:
        for process in processes:
            if process.machine.channel.is_open:
                process.machine.channel.send(kill=process.number, signal=number)

    def _forward(self, number: int) -> None:
        """Forward a signal to all processes; most signals end the job."""
        ends = number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if ends and self._stop is None:
            self._stop = time.monotonic(), number
            self._code = self._code if self._generation.number else 128 + number
        for process in self._processes.values():
            self._kill([process], number if process.is_member or not ends else signal.SIGKILL)

    # -------------------------------------------------------------------------------- generations

    def _publish(self, members: Sequence[int], came: Sequence[int] = ()) -> None:
        every = [*members, *came]
        machines = [self._processes[number].machine.number for number in every]
        self._generation = Generation(self._generation.number + 1, every, machines, list(came))
        self._store.publish(self._generation)
        self._are_there, self._connections_failed_at = False, 0.0
        for machine in self._machines.values():
            if machine.channel.is_open:
                machine.channel.send(wake=True)
        for number in members:
            self._processes[number].is_member = True

    def _publish_members(self) -> None:
        """Begin a generation with the members that are left, without newcomers that have not arrived."""
        processes = map(self._processes.get, self._generation.members)
        self._publish([process.number for process in processes if process is not None and process.is_member])

    def _rank_of(self, process: Process) -> str:
        members = self._generation.members
        return f"rank {members.index(process.number)}" if process.number in members else "a new process"

    def _have_arrived(self) -> bool:
        """Whether all processes have entered the latest generation."""
        self._are_there = self._are_there or self._store.have_arrived(self._generation)
        return self._are_there

    def _is_busy(self) -> bool:
        """Whether work is pending whose completion is not announced by a message."""
        are_members = self._processes.keys() <= set(self._generation.members)
        return not (self._are_there and are_members) or self._stop is not None or bool(self._connections_failed_at)

    def _check(self) -> None:
        """Run the periodic checks: signals, heartbeats, arrivals, newcomers, lost connections, stuck processes."""
        now = time.monotonic()
        while self._signals:
            self._forward(self._signals.pop(0))
        if self._stop is not None and now - self._stop[0] > _SECONDS_TO_END:
            self._kill(self._processes.values(), signal.SIGKILL)
        self._watch_machines(now)
        if self._is_ending or self._stop is not None or not self._generation.number:
            return
        if self._change is not None and self._have_arrived() and self._generation.members:
            begin, what = self._change
            self._change = None
            count = len(self._generation.members)
            _log(f"{what}. {_counted(count)} after {now - begin:.2f} s.")
        if self._have_arrived():
            self._count_newcomers()
        if not self._regroup_if_connections_failed(now) and self._have_arrived():
            self._admit_newcomers()
        if self._patience and now >= self._next_check:
            self._next_check = now + _SECONDS_BETWEEN_CHECKS
            self._end_stuck(now)

    def _watch_machines(self, now: float) -> None:
        """Send heartbeats to the other machines, and continue without those whose heartbeats have stopped.

        A machine that has been silent for half of the patience gets no more heartbeats, so it kills its processes
        within the other half. They are gone before the others continue.
        """
        others = [machine for machine in self._machines.values() if not machine.is_local]
        if not self._patience or now < self._next_beat:
            return
        self._next_beat = now + SECONDS_BETWEEN_BEATS
        for machine in others:
            silent = now - machine.heard_at
            if silent < self._patience / 2:
                machine.channel.send(beat=True)
            elif silent > self._patience + 2 * SECONDS_BETWEEN_BEATS:
                self._lose_machine(machine, f"gave no sign of life for {self._patience:.0f} s")

    def _end_stuck(self, now: float) -> None:
        """Kill the processes that are stuck while others wait for them."""
        generation = self._generation
        are_all_there = self._have_arrived()
        progress: dict[int, Liveness] = {}
        for number in generation.members:
            process = self._processes.get(number)
            if process is None or process.progress is None:
                continue
            process.progress.note(self._store.get(Key.PROGRESS, number), now)
            if are_all_there or not self._store.has_arrived(generation, number):
                progress[number] = process.progress
        for number in find_stuck(progress, now, self._patience, are_all_there):
            self._store.put(Key.FAILED, f"it did nothing for {self._patience:.0f} s while others waited for it", number)
            self._kill([self._processes[number]], signal.SIGKILL)

    def _count_newcomers(self) -> None:
        """Mark all processes of the generation as members, once all have arrived."""
        for number in self._generation.members:
            if number in self._processes:
                self._processes[number].is_member = True

    def _admit_newcomers(self) -> None:
        """Begin a generation with the new processes that are ready, as far as the run can use them."""
        members = self._generation.members
        ready = [n for n in self._processes if n not in members and self._store.get(Key.READY, n) is not None]
        if not ready:
            return
        most = int(self._store.get(Key.MOST_PROCESSES) or len(self._processes))
        room = max(most - len(members), 0)
        if too_many := ready[room:]:
            _log(f"{_new(len(too_many))} not let in: the run has {most} logical processes.")
            for number in too_many:
                self._kill([self._processes.pop(number)], signal.SIGKILL)
        if ready[:room]:
            self._publish(members, ready[:room])
            self._note_change(f"{_new(room if len(ready) > room else len(ready))} joined")

    def _note_change(self, what: str) -> None:
        """Note a change, to be logged once the processes continue."""
        if self._change is not None:
            _log(f"{self._change[1]}.")
        self._change = time.monotonic(), what

    def _regroup_if_connections_failed(self, now: float) -> bool:
        """Begin a generation with the same members if connections were lost although no process has ended.

        Returns:
            whether connections were lost
        """
        if self._store.get(Key.LOST_CONNECTIONS, self._generation.number) is None:
            return False
        self._connections_failed_at = self._connections_failed_at or now
        if now - self._connections_failed_at > _SECONDS_TO_DIE:
            self._publish_members()
        return True


def _as_exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _counted(count: int) -> str:
    return "One process continued" if count == 1 else f"{count} processes continued"


def _new(count: int) -> str:
    return f"{count} new process{'es' * (count > 1)}"


def _log(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
