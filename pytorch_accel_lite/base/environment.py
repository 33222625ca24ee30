"""Where the program runs: cores, notebooks, terminals, optional packages."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType, TracebackType
from typing import TextIO

#: The directories of Python and of installed packages.
LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib"))
LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"
HANG_VARIABLE = "PT_ACC_HANG_SECONDS"


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_per_process(processes: int) -> int:
    """Return the number of cores of this machine available to each process, at least one.

    :param processes: number of processes in the job, assumed to be on this machine unless the launcher says otherwise
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return max(available_cores() // max(local_processes, 1), 1)


def in_notebook() -> bool:
    """Whether this program runs in an IPython kernel that shows what it displays, rather than merely importing IPython.

    Of a process forked by a kernel, as by Accelerate's ``notebook_launcher``, Jupyter shows only the text.
    """
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython and ipython.get_ipython(), "kernel", None)
    session = getattr(kernel, "session", None)
    return kernel is not None and getattr(session, "pid", os.getpid()) == os.getpid()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; ``None`` is not."""
    return bool(stream is not None and stream.isatty())


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise an ``ImportError`` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = "pillow" if module.startswith("PIL") else module.partition(".")[0]
        raise ImportError(f"{purpose} needs {package}. Install it with: {install_command(extra, package)}") from error


def install_command(extra: str, package: str) -> str:
    """Return the command that installs the requirements of an extra of this package.

    It names the requirements rather than the extra: ``pip install 'pytorch-accel-lite[extra]'`` finds nothing, or
    another version, if this package was installed from a clone, a git URL or a file.

    :param package: the package to install if the extra is unknown, as in a checkout that was never installed
    """
    try:
        required = metadata.requires("pytorch-accel-lite") or []
    except metadata.PackageNotFoundError:
        required = []
    pattern = re.compile(rf"""\bextra\s*==\s*["']{re.escape(extra)}["']""")
    requirements = [line.partition(";")[0].strip() for line in required if pattern.search(line)]
    return f"pip install {shlex.join(requirements or [package])}"


def leave_out_libraries(error: BaseException) -> None:
    """Remove the frames of libraries from the traceback of an error, except the first, which calls this."""
    trace = error.__traceback__
    while trace is not None:
        following = trace.tb_next
        while trace.tb_next is not None and is_of_library(trace.tb_next.tb_frame.f_globals.get("__name__")):
            trace.tb_next = trace.tb_next.tb_next
        trace = following
    error.__suppress_context__ = True


_CALLS_OF_MODULES = "torch.nn.modules.module"


def hide_frames(error: BaseException) -> None:
    """In IPython, remove this package's frames from the traceback of an error, and torch's that only call modules.

    What is left are lines of the user, of what these have called, and the check of ours that has raised the error.
    Everything stays if the error comes from a line of this package that checks nothing.
    """
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return
    chain: list[BaseException] = []
    part: BaseException | None = error
    while part is not None and part not in chain:
        chain.append(part)
        *_, innermost = _entries(part)
        is_check = isinstance(part, (ValueError, TypeError, RuntimeError))
        if is_check or not is_in_this_package(_module_of(innermost)):
            for trace in _entries(part):
                following = trace.tb_next
                while following is not None and following is not innermost and _is_hidden(_module_of(following)):
                    following = following.tb_next
                trace.tb_next = following
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)


def _entries(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _module_of(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__"))


def _is_hidden(module: str) -> bool:
    return is_in_this_package(module) or module == _CALLS_OF_MODULES


def is_in_this_package(module: object) -> bool:
    """Whether a module, given by its name, belongs to this package."""
    return str(module).partition(".")[0] == "pytorch_accel_lite"


def is_of_library(module: object) -> bool:
    """Whether a module, given by its name, belongs to this package, to Python or to an installed package."""
    file = getattr(sys.modules.get(str(module)), "__dict__", {}).get("__file__")
    return is_in_this_package(module) or (file is not None and os.path.realpath(file).startswith(LIBRARIES))


def warn_outside(message: str) -> None:
    """Warn at the innermost line outside this package, from which the user called it."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001
    while frame.f_back is not None and is_in_this_package(frame.f_globals.get("__name__")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
