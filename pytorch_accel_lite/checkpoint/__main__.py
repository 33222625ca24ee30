"""Inspect or verify a training state: ``python -m pytorch_accel_lite.checkpoint inspect DIRECTORY``."""

from __future__ import annotations

import argparse
import sys

from pytorch_accel_lite.checkpoint.files import parse_location
from pytorch_accel_lite.checkpoint.manifest import DamagedStateError, verify_state
from pytorch_accel_lite.checkpoint.remote import local_copy
from pytorch_accel_lite.checkpoint.summary import print_contents


def main() -> int:
    """Run the command line; the exit code is 1 if the state is not intact."""
    parser = argparse.ArgumentParser(prog="python -m pytorch_accel_lite.checkpoint", description=__doc__)
    parser.add_argument("command", choices=["inspect", "verify"])
    parser.add_argument("state", type=parse_location, help="its directory or URL")
    arguments = parser.parse_args()
    try:
        if arguments.command == "inspect":
            print_contents(arguments.state)
        else:
            with local_copy(arguments.state) as directory:
                verify_state(directory)
            print(f"{arguments.state} is intact")
    except (DamagedStateError, FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
