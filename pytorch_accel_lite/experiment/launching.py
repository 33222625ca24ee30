"""Starting the processes of a job on this machine, on the devices that are free, by torch's elastic launcher."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate.utils import patch_environment

_FIELDS = "index,uuid,utilization.gpu,memory.used,memory.total"
_QUERY = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
_IDLE = 10  # percent of utilisation, and of memory, up to which a device counts as idle


class LaunchError(RuntimeError):
    """A process of a job failed, and all were ended. The message has its rank and its traceback.

    :ivar rank: the rank that failed first
    :ivar exit_code: its exit code, or minus the number of the signal that killed it
    :ivar reason: the message of its error, if it had one
    """

    def __init__(self, rank: int, exit_code: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.reason = reason


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    processes: int | None = None,
    devices: str | Sequence[int] | None = None,
    restarts: int = 0,
) -> list[Any]:
    """Run a function on several processes of this machine, as torchrun runs a script.

    Call it under ``if __name__ == "__main__":``, as each process imports the program again.

    :param function: creates the model and the trainer; must be importable, not defined in a notebook
    :param args: its arguments
    :param processes: number of processes; by default one for each of the devices
    :param devices: ``"idle"`` for the GPUs with the least load and memory in use, or their numbers, as in ``"0,2"``; by
        default all that are visible, or the CPU
    :param restarts: how often all processes are started again after one has failed
    :return: what the function returned, in rank order
    :raises LaunchError: if a process fails, with its rank and its traceback; all others are ended
    :raises ValueError: if there are not as many idle devices
    """
    if "<locals>" in getattr(function, "__qualname__", ""):
        raise ValueError(f"function={function.__qualname__} must be defined at the top of a module, to be found there.")
    results = _run(function, tuple(args), processes, devices, restarts)
    return [results[rank] for rank in sorted(results)]


def launch_command(
    command: Sequence[str], processes: int | None = None, devices: str | None = None, restarts: int = 0
) -> None:
    """Run this interpreter with arguments on several processes; see :func:`launch`."""
    _run(sys.executable, tuple(command), processes, devices, restarts)


def _run(
    entry: Any, args: tuple[Any, ...], processes: int | None, devices: str | Sequence[int] | None, restarts: int
) -> dict[int, Any]:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    chosen = choose_devices(devices, processes)
    count = processes if processes is not None else len(chosen or [0])
    if count < 1:
        raise ValueError(f"processes={count} must be at least 1.")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # restarted processes need a store of their own
    if count > 1:
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # as torchrun does
    if chosen is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    with patch_environment(**variables), _signal_handlers():
        try:
            return dict(elastic_launch(config, entry)(*args))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise _launch_error(rank, failure) from None
        except SignalException as stop:  # which the processes have received, too
            is_from_keyboard = stop.sigval == signal.SIGINT
            raise (KeyboardInterrupt() if is_from_keyboard else SystemExit(128 + stop.sigval)) from None


def _launch_error(rank: int, failure: Any) -> LaunchError:
    record = failure.message
    if isinstance(record, dict):
        message = record.get("message", "")
        trace = record.get("extraInfo", {}).get("py_callstack") or message
        text = f"Rank {rank} failed, and all processes were ended:\n\n{trace.rstrip()}"
        return LaunchError(rank, failure.exitcode, text, message.partition(": ")[2])
    is_killed = failure.exitcode < 0
    how = f"was killed by {failure.signal_name()}" if is_killed else f"ended with exit code {failure.exitcode}"
    return LaunchError(rank, failure.exitcode, f"Rank {rank} {how}, and all processes were ended.")


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that torch's launcher replaces, after a block."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@dataclass
class _Device:
    number: str
    uuid: str
    load: float  # in percent; NaN where the driver does not know a value, as on a GPU that is divided
    memory: float  # in use, in percent; NaN on a GPU that shares the host's

    def __str__(self) -> str:
        load, memory = ("unknown" if math.isnan(value) else f"{value:.0f} %" for value in (self.load, self.memory))
        return f"GPU {self.number}: load {load}, memory {memory}"


def choose_devices(devices: str | Sequence[int] | None, processes: int | None) -> list[str] | None:
    """Return the devices for the processes of a job, as ``CUDA_VISIBLE_DEVICES`` has them; ``None`` leaves it alone.

    :raises ValueError: if there are not as many
    """
    if devices is None:
        return None
    existing = _list_devices()
    if devices == "idle":
        return _idle_devices(existing, 1 if processes is None else processes)
    numbers = [str(number).strip() for number in (devices.split(",") if isinstance(devices, str) else devices)]
    if processes is not None and processes != len(numbers):
        raise ValueError(
            f"processes={processes} does not fit devices={devices!r}: each process needs a GPU of its own. Leave "
            "processes out to start one for each."
        )
    by_number = {device.number: device.uuid for device in existing}
    for number in numbers:
        if number not in by_number:
            there_are = f"only {', '.join(sorted(by_number))}" if by_number else "nor any other"
            raise ValueError(f"devices={devices!r}: there is no GPU {number}, {there_are}.")
    return [by_number[number] for number in numbers]  # as CUDA may number them otherwise, the fastest first


def _idle_devices(existing: list[_Device], count: int) -> list[str]:
    idle = []
    for device in existing:
        in_use = [value for value in (device.load, device.memory) if not math.isnan(value)]
        if in_use and max(in_use) <= _IDLE:
            idle.append((-len(in_use), in_use, device.uuid))  # the more is known, the earlier
    if len(idle) < count:
        states = "; ".join(map(str, existing)) or "there is no GPU"
        raise ValueError(
            f"devices='idle': too few idle GPUs: {count} needed, {len(idle)} idle ({states}). Wait, ask for fewer "
            "processes, or name the GPUs to use anyway."
        )
    return [name for _, _, name in sorted(idle)[:count]]


def _list_devices() -> list[_Device]:
    """Return the GPUs that this process may use, as the driver's tool lists them."""
    try:
        output = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = []
    for line in output.splitlines():
        number, name, *values = (field.strip() for field in line.split(","))
        load, used, total = (float(text) if text.isdigit() else math.nan for text in values)  # "[N/A]" and the like
        if visible is None or {number, name} & {text.strip() for text in visible.split(",")}:
            devices.append(_Device(number, name, load, 100 * used / total))
    return devices
