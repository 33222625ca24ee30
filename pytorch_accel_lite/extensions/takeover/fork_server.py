"""A fork server: it imports torch once and forks the worker processes of a job, which start in milliseconds.

There is one on each machine of the job. It starts no threads, not even torch's, as forked processes would hang.
"""

from __future__ import annotations

import ctypes
import gc
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

from pytorch_accel_lite.extension_tools.processes import die_with_parent
from pytorch_accel_lite.extensions.takeover import worker
from pytorch_accel_lite.extensions.takeover.json_channel import SECONDS_BETWEEN_BEATS, Channel

#: Options of glibc's mallopt(), their environment variables and values: M_MMAP_THRESHOLD (32 MiB) and
#: M_TRIM_THRESHOLD (1 GiB).
_KEPT = ((-3, "MALLOC_MMAP_THRESHOLD_", 1 << 25), (-1, "MALLOC_TRIM_THRESHOLD_", 1 << 30))
#: Modules that torch and programs import on first use, which takes seconds.
IMPORTED_LATE = "torch._dynamo", "torch.distributed.nn", "torchmetrics"


class LostSupervisorError(Exception):
    """The supervisor has been silent for so long that the job may have continued without this machine."""


class Child(NamedTuple):
    """A process that a fork server has started.

    Args:
        number: the number of the process in the job
        process: the process id
        wakes: the write end of the pipe that wakes the process
    """

    number: int
    process: int
    wakes: int


class ForkServer:
    """Starts and kills processes on the orders of the supervisor, and reports their CPU time and exits.

    Args:
        channel: the connection to the supervisor
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._children: dict[int, Child] = {}  # by their pidfds
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._heard_at = time.monotonic()
        self._lease: float | None = None  # seconds without a message, after which all processes end
        self._is_over: int | None = None

    def serve(self) -> dict[str, Any] | int:
        """Start processes until the job ends, and return its exit code. In each forked process, return its order.

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
        """Carry out the orders of the supervisor. In a forked process, return its order."""
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
        """Fork a process; return ``True`` in the child."""
        order["wakes"] = waked, wakes = os.pipe2(os.O_NONBLOCK)
        process = os.fork()
        if not process:
            os.setsid()  # so that signals to the supervisor's group do not reach it
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
        """Wake the processes, as a new generation has begun."""
        for child in self._children.values():
            with suppress(BlockingIOError, BrokenPipeError):  # the pipe is full, or the process is exiting
                os.write(child.wakes, b"\0")

    def _report_end(self, descriptor: int) -> None:
        number, process, wakes = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        os.close(wakes)
        _, status = os.waitpid(process, 0)
        with suppress(ProcessLookupError, PermissionError):  # its own children, such as data workers
            os.killpg(process, signal.SIGKILL)
        self._channel.send(ended=number, code=os.waitstatus_to_exitcode(status))

    def _report_computing(self) -> None:
        """Report the CPU time of each process, which is also the heartbeat of this machine."""
        computed = {child.number: _cpu_seconds(child.process) for child in self._children.values()}
        self._channel.send(computed=computed)


def _cpu_seconds(process: int) -> float:
    """Return the CPU time of a process, in seconds."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def prepare() -> None:
    """Import what the processes need, and configure malloc to keep the memory that an update frees."""
    _keep_memory()
    for name in IMPORTED_LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the forked processes neither scan nor copy what is imported


def _keep_memory() -> None:
    """Configure glibc to keep freed memory; otherwise it may return and request megabytes in each update.

    Its environment variables take precedence.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, name, size in _KEPT:
        if mallopt is not None and name not in os.environ:
            mallopt(option, size)


def begin(order: dict[str, Any]) -> None:
    """Run the program of an order in this forked process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    worker.run(worker.Order(**order))


def main(arguments: Sequence[str]) -> None:
    """Serve the supervisor. The argument is the descriptor of the channel to it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()
    with suppress(LostSupervisorError):
        order = ForkServer(Channel(socket.socket(fileno=int(arguments[0])))).serve()
        if not isinstance(order, int):
            begin(order)


if __name__ == "__main__":
    main(sys.argv[1:])
