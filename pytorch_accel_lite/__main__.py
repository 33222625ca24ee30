"""The command line: ``python -m pytorch_accel_lite --help``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from pytorch_accel_lite.extensions.experiment.command_line import main as run
from pytorch_accel_lite.extensions.takeover.launch_command import main as launch

#: Commands with arguments of their own, by name; all others are those of the one without a name.
COMMANDS: Mapping[str, Callable[..., int]] = {
    "launch": launch,
    "": run,
}  # fmt: skip


def main() -> int:
    """Run the command line, and return its exit code."""
    arguments = sys.argv[1:]
    command = COMMANDS.get(arguments[0]) if arguments and arguments[0] else None
    if command is not None:
        return command(arguments[1:])
    if "" not in COMMANDS:
        sys.exit(f"There are these commands: {', '.join(COMMANDS)}.")
    return COMMANDS[""](others={name: _summary(command) for name, command in COMMANDS.items() if name})


def _summary(command: Callable[..., int]) -> str:
    """Return the first line of the documentation of a command, as the help lists it."""
    line, *_ = (command.__doc__ or "").splitlines()
    return line[:1].lower() + line[1:].removesuffix(".")


if __name__ == "__main__":
    sys.exit(main())
