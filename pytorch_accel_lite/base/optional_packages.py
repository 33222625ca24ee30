"""Optional packages: importing them, and the commands that install them."""

from __future__ import annotations

import importlib
import re
import shlex
from importlib import metadata
from types import ModuleType


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
