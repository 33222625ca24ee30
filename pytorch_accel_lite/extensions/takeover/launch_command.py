"""The command ``launch``: run a program on several processes, any of which may be lost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pytorch_accel_lite.extensions.takeover.joining_machines import join
from pytorch_accel_lite.extensions.takeover.supervisor import Supervisor

_DESCRIPTION = """\
Run a program on several processes, any of which may be lost.

The others then take over its part of the work at once, and the results are those of
a run that was not disturbed. This needs Trainer(..., seed=..., logical_processes=...)."""


def main(arguments: Sequence[str]) -> int:
    """Run a program on several processes, any of which may be lost."""
    parser = create_launch_parser()
    options = parser.parse_args(arguments)
    if options.join is not None:
        if options.program or not options.processes:
            parser.error("--join takes --processes and no program: it runs that of the job.")
        return join(options.join, options.processes, options.wait)
    if not options.program:
        parser.error("the program is missing: launch --processes 4 script.py")
    if options.listen is None and not options.processes:
        if "--processes" in options.program:
            parser.error("--processes comes before the program: launch --processes 4 script.py")
        parser.error("--processes is missing: how many to start on this machine")
    program = ["-m", *options.program] if options.module else options.program
    return Supervisor(
        program,
        options.processes,
        begins_with=options.begin_with or options.processes or 1,
        address=options.listen,
        replaces=options.replace,
        min_processes=options.min_processes,
        max_failures=options.max_failures,
        patience=options.patience,
    ).run()


def create_launch_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = argparse.ArgumentParser(
        "python -m pytorch_accel_lite launch",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--processes", type=_positive, default=0, metavar="N", help="how many processes to start on this machine")
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
    text = "let other machines join; without --processes, supervise only"
    add("--listen", type=_address, metavar="HOST:PORT", help=text)
    text = "begin once this many processes have joined, on all machines together; those of --processes"
    add("--begin-with", type=_positive, metavar="N", help=text)
    text = "start processes of a job that listens there, also to make it larger while it runs"
    add("--join", type=_address, metavar="HOST:PORT", help=text)
    add("--wait", type=float, default=60.0, metavar="SECONDS", help="how long --join tries to reach the job; 60")
    add("-m", dest="module", action="store_true", help="the program is a module, as for python -m")
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="a script, and its arguments")
    return parser


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and port.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 10.0.0.1:29400")
    return host, int(port)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)
