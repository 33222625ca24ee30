"""The command ``launch``: several processes that run a program, of which each may be lost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pytorch_accel_lite.extensions.takeover.supervisor import Supervisor

_DESCRIPTION = """\
Runs a program on several processes of this machine. If one of them is lost, the
others take over its part of the work at once, and the results are those of a run
that was not disturbed. This needs Trainer(..., seed=..., logical_processes=...)."""


def main(arguments: Sequence[str]) -> int:
    """Run a program on several processes, any of which may be lost."""
    options = _parser().parse_args(arguments)
    program = ["-m", *options.program] if options.module else options.program
    return Supervisor(
        program,
        options.processes,
        replaces=options.replace,
        min_processes=options.min_processes,
        max_failures=options.max_failures,
        patience=options.patience,
    ).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m pytorch_accel_lite launch",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--processes", type=_positive, required=True, metavar="N", help="how many processes to start")
    add("--replace", action="store_true", help="start a new process for each that is lost")
    add("--min-processes", type=_positive, default=1, metavar="N", help="end the job when fewer are left; 1")
    add("--max-failures", type=_positive, metavar="N", help="end the job when more have failed; by default, never")
    add(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="kill a process that does nothing for so long while others wait for it; 60, and 0 for never",
    )
    add("-m", dest="module", action="store_true", help="the program is a module, as for python -m")
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="a script, and its arguments")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number
