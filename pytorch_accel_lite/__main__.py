"""The command line: ``python -m pytorch_accel_lite --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

from pytorch_accel_lite.extensions.experiment.command_line import main as run
from pytorch_accel_lite.extensions.takeover.launch_command import create_launch_parser as options_of_launch
from pytorch_accel_lite.extensions.takeover.launch_command import main as launch

#: Commands with their own arguments, by name; the command without a name gets all others.
COMMANDS: Mapping[str, Callable[..., int]] = {
    "launch": launch,
    "": run,
}  # fmt: skip
#: The parsers of these arguments, by command.
PARSERS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    "launch": options_of_launch,
}  # fmt: skip


def main() -> int:
    """Run the command line, and return its exit code."""
    arguments = sys.argv[1:]
    command = COMMANDS.get(arguments[0]) if arguments and arguments[0] else None
    if command is not None:
        return command(arguments[1:])
    if "" not in COMMANDS:
        sys.exit(f"There are these commands: {', '.join(COMMANDS)}.")
    return COMMANDS[""](others={name: create() for name, create in PARSERS.items()})


if __name__ == "__main__":
    sys.exit(main())
