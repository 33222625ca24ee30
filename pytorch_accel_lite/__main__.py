"""The command line: ``python -m pytorch_accel_lite --help``."""

from __future__ import annotations

import sys

from pytorch_accel_lite.extensions.experiment.command_line import main as run


def main() -> int:
    """Run the command line, and return its exit code."""
    return run()


if __name__ == "__main__":
    sys.exit(main())
