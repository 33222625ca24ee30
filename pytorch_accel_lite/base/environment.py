"""Where the program runs: cores, notebooks, terminals, optional packages."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from importlib import metadata
from types import ModuleType
from typing import TextIO

LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_per_process(processes: int) -> int:
    """Return the number of cores of this machine available to each process, at least one.

    Args:
        processes: number of processes in the job, assumed to be on this machine unless the launcher says otherwise
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return max(available_cores() // max(local_processes, 1), 1)


def in_notebook() -> bool:
    """Whether this program runs in an IPython kernel that shows displays, rather than merely importing IPython.

    In processes forked by a kernel, as by Accelerate's ``notebook_launcher``, Jupyter shows only text.
    """
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython and ipython.get_ipython(), "kernel", None)
    session = getattr(kernel, "session", None)
    return kernel is not None and getattr(session, "pid", os.getpid()) == os.getpid()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; ``None`` is not one."""
    return bool(stream is not None and stream.isatty())


def shows_live(stream: TextIO | None) -> bool:
    """Whether what is written to a stream is watched as it appears, in a notebook or a terminal, not kept as lines."""
    return in_notebook() or is_terminal(stream)


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

    Args:
        package: the package to install if the extra is unknown, as in a checkout that was never installed
    """
    try:
        required = metadata.requires("pytorch-accel-lite") or []
    except metadata.PackageNotFoundError:
        required = []
    pattern = re.compile(rf"""\bextra\s*==\s*["']{re.escape(extra)}["']""")
    requirements = [line.partition(";")[0].strip() for line in required if pattern.search(line)]
    return f"pip install {shlex.join(requirements or [package])}"
