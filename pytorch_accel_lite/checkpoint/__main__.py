"""Inspect, verify or compare training states: ``python -m pytorch_accel_lite.checkpoint inspect DIRECTORY``.

``verify DIRECTORY`` checks whether a state is intact. ``diff FIRST SECOND`` compares two states, or two directories of
states, and tells where the runs first differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytorch_accel_lite.checkpoint.comparison import compare
from pytorch_accel_lite.checkpoint.contents import print_contents
from pytorch_accel_lite.checkpoint.files import place
from pytorch_accel_lite.checkpoint.locations import local_copy
from pytorch_accel_lite.checkpoint.training_state import DamagedStateError, verify_state

_SHOWN = 10


def diff(first: Path, second: Path) -> int:
    """Print where two states, or the states of two runs, first differ. Return 1 if they do."""
    same: list[str] = []
    for name, found in compare(first, second):
        if found:
            earlier = f", after {same[-1]}, which is the same" if same else ""
            print(f"{name} differs{earlier}:")
            print("\n".join(f"  {difference}" for difference in found[:_SHOWN]))
            if len(found) > _SHOWN:
                print(f"  and {len(found) - _SHOWN} more")
            return 1
        same.append(name)
    print(f"the same to the last bit: {', '.join(same)}")
    return 0


def main() -> int:
    """Run the command line; the exit code is 1 if the state is not intact, or if states differ."""
    parser = argparse.ArgumentParser(prog="python -m pytorch_accel_lite.checkpoint", description=__doc__)
    parser.add_argument("command", choices=["inspect", "verify", "diff"])
    parser.add_argument("directory", type=place, help="directory or URL of the state; diff takes directories only")
    parser.add_argument("other", type=Path, nargs="?", help="the state or states to compare with, for diff")
    arguments = parser.parse_args()
    if (arguments.command == "diff") != (arguments.other is not None):
        parser.error("diff compares two directories; the other commands take one")
    try:
        if arguments.command == "diff":
            if isinstance(arguments.directory, str):
                parser.error("diff compares directories: fetch the states from the remote store first")
            return diff(arguments.directory, arguments.other)
        if arguments.command == "inspect":
            print_contents(arguments.directory)
        else:
            with local_copy(arguments.directory) as directory:
                verify_state(directory)
            print(f"{arguments.directory} is intact")
    except (DamagedStateError, FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
