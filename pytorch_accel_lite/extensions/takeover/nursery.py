"""A process that has imported everything, of which those of a job are copies: they begin in milliseconds.

There is one on each machine of the job. It has no threads, and none of torch's: a copy of those would hang.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pytorch_accel_lite.extensions.takeover import worker
from pytorch_accel_lite.extensions.takeover.channel import SECONDS_BETWEEN_BEATS, Channel

#: Options of glibc's mallopt(), with their variables: M_MMAP_THRESHOLD, of 32 MiB, and M_TRIM_THRESHOLD, of 1 GiB.
_KEPT = ((-3, "MALLOC_MMAP_THRESHOLD_", 1 << 25), (-1, "MALLOC_TRIM_THRESHOLD_", 1 << 30))
#: What torch, and programs, import when they first need it, which takes seconds.
IMPORTED_LATE = "torch._dynamo", "torch.distributed.nn", "torchmetrics"


class LostSupervisorError(Exception):
    """The supervisor has not been heard of for so long that the others may have gone on without this machine."""


class Child(NamedTuple):
    """A process that a nursery has started.

    Args:
        number: the number of the process in the job
        process: the id that the system gave to the process
        wakes: the descriptor to which a byte is written to wake the process
    """

    number: int
    process: int
    wakes: int


class Nursery:
    """Starts and kills processes as told through a channel, and tells what they do and how they end.

    Args:
        channel: the connection to the supervisor
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._children: dict[int, Child] = {}  # by descriptors that tell when they end
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._heard_at = time.monotonic()
        self._lease: float | None = None  # seconds without a word from the supervisor, after which all ends
        self._is_over: int | None = None

    def serve(self) -> dict[str, Any] | int:
        """Start processes until the job ends, and return its exit code. In each of them, return what it is to do.

        Raises:
            LostSupervisorError: if the connection is lost; the processes have been killed
        """
        next_beat = 0.0
        while self._is_over is None:
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + SECONDS_BETWEEN_BEATS
                self._report_computing()
            for descriptor, _ in self._poll.poll(1000 * SECONDS_BETWEEN_BEATS):
                if descriptor in self._children:
                    self._report_end(descriptor)
                elif (order := self._follow_orders()) is not None:
                    return order
            if self._lease is not None and time.monotonic() - self._heard_at > self._lease:
                self._lose_supervisor()
        return self._is_over

    def _follow_orders(self) -> dict[str, Any] | None:
        """Do what the supervisor says. In a process that it starts, return what that is to do."""
        try:
            orders = self._channel.receive()
        except OSError:
            orders = None
        if orders is None:
            self._lose_supervisor()
        self._heard_at = time.monotonic()
        for order in orders or ():
            if "number" in order:
                if self._start(order):
                    return order
            elif "kill" in order:
                self._kill(order["kill"], order["signal"])
            elif "wake" in order:
                self._wake()
            elif "code" in order:
                self._is_over = order["code"]
            else:
                self._lease = order.get("lease", self._lease)
        return None

    def _lose_supervisor(self) -> None:
        for child in self._children.values():
            with suppress(ProcessLookupError):
                os.killpg(child.process, signal.SIGKILL)
            os.waitpid(child.process, 0)
        raise LostSupervisorError

    def _start(self, order: dict[str, Any]) -> bool:
        """Start a process; return whether this is it."""
        order["wakes"] = waked, wakes = os.pipe2(os.O_NONBLOCK)
        process = os.fork()
        if not process:
            os.setsid()  # so that a signal to the supervisor's group does not reach it, too
            self._channel.close()
            for descriptor, child in self._children.items():
                os.close(descriptor)
                os.close(child.wakes)
            return True
        os.close(waked)
        descriptor = os.pidfd_open(process)
        self._children[descriptor] = Child(order["number"], process, wakes)
        self._poll.register(descriptor, select.POLLIN)
        return False

    def _kill(self, number: int, with_signal: int) -> None:
        for child in self._children.values():
            if child.number == number:
                os.kill(child.process, with_signal)

    def _wake(self) -> None:
        """Let the processes look at the generation that has begun."""
        for child in self._children.values():
            with suppress(BlockingIOError, BrokenPipeError):  # it has not looked for long, or is just ending
                os.write(child.wakes, b"\0")

    def _report_end(self, descriptor: int) -> None:
        number, process, wakes = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        os.close(wakes)
        _, status = os.waitpid(process, 0)
        with suppress(ProcessLookupError, PermissionError):  # what it has started itself, such as workers
            os.killpg(process, signal.SIGKILL)
        self._channel.send(ended=number, code=os.waitstatus_to_exitcode(status))

    def _report_computing(self) -> None:
        """Tell how long each process has computed. It is also the sign that this machine is there."""
        computed = {child.number: _cpu_seconds(child.process) for child in self._children.values()}
        self._channel.send(computed=computed)


def _cpu_seconds(process: int) -> float:
    """Return the time that a process has computed, as the system says."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def prepare() -> None:
    """Import what the processes need, once for all, and let each keep the memory that an update frees."""
    _keep_memory()
    for name in IMPORTED_LATE:
        with suppress(ImportError):
            importlib.import_module(name)


def _keep_memory() -> None:
    """Let glibc keep what is freed: otherwise it may return and request megabytes in each update.

    Variables of the environment that set this take precedence.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, name, size in _KEPT:
        if mallopt is not None and name not in os.environ:
            mallopt(option, size)


def begin(order: dict[str, Any]) -> None:
    """Be the process that an order asks for, and run its program."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worker.die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    worker.run(worker.Order(**order))


def main(arguments: Sequence[str]) -> None:
    """Serve the supervisor, with the descriptor of the channel to it as the argument."""
    worker.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()
    with suppress(LostSupervisorError):
        order = Nursery(Channel(socket.socket(fileno=int(arguments[0])))).serve()
        if not isinstance(order, int):
            begin(order)


if __name__ == "__main__":
    main(sys.argv[1:])
