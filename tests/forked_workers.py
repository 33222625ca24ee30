"""Workers of pytest-xdist that are forks of one process: what tests import is imported once, not in each of them."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from _pytest.warnings import catch_warnings_for_item

from tests.launching import ROOT, Fork


class ForkedWorker(Fork):
    """A fork in place of the interpreter that pytest-xdist starts for a worker.

    Args:
        code: what the interpreter would run

    Attributes:
        is_this: whether this process is one
        stdin: the end of a pipe that writes to its standard input
        stdout: the end of a pipe that reads its standard output
    """

    is_this: ClassVar[bool] = False
    _ends: ClassVar[list[int]] = []  # those of this process, which no fork may keep open

    def __init__(self, code: str) -> None:
        (reads, write), (read, writes) = os.pipe(), os.pipe()
        self._ends.extend((write, read))
        # What it prints when it crashes is shown, as usual.
        super().__init__(partial(self._work, code, reads, writes), Path("/dev/stderr"))
        os.close(reads)
        os.close(writes)
        self.stdin, self.stdout = os.fdopen(write, "wb"), os.fdopen(read, "rb")

    def _work(self, code: str, reads: int, writes: int) -> None:
        ForkedWorker.is_this = True
        for end in self._ends:
            os.close(end)
        for target, (source, mode) in enumerate(((reads, "r"), (writes, "w"))):
            os.dup2(source, target)
            os.close(source)
            setattr(sys, ("stdin", "stdout")[target], open(target, mode, closefd=False))  # noqa: SIM115
        sys.stderr = sys.__stderr__
        exec(code, {"__name__": "__main__"})
        atexit._run_exitfuncs()


def fork_workers(config: pytest.Config, count: int) -> None:
    """Import what is about to be tested, and let the workers of pytest-xdist be forks of this process.

    A worker that is started later, in place of one that crashed, is a fresh interpreter.
    """
    from execnet import gateway_io

    for argument in config.args:
        path = Path(argument.partition("::")[0])
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            _import(config, file)
    gc.collect()
    workers = [ForkedWorker(gateway_io.popen_bootstrapline) for _ in range(count)]  # before execnet starts threads
    fresh = gateway_io.Popen2IOMaster

    class Pipes(fresh):  # type: ignore[misc, valid-type]
        def __init__(self, args: list[str], execmodel: Any) -> None:
            if not workers:
                super().__init__(args, execmodel)
                return
            self.popen = workers.pop(0)
            gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)

    gateway_io.Popen2IOMaster = Pipes


def _import(config: pytest.Config, file: Path) -> None:
    """Import a file of tests, with pytest's filters of warnings; if it fails, so will the workers, and report it."""
    with suppress(BaseException), catch_warnings_for_item(config, config.hook, "collect", None):
        importlib.import_module(".".join(file.resolve().relative_to(ROOT).with_suffix("").parts))
