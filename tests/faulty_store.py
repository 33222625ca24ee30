"""A remote store that injects faults: ``faulty:///folder`` is a folder on disk; operations fail, kill or truncate."""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FaultyStore(LocalFileSystem):
    """Counts its operations. At most one fault at a time is set on the class."""

    protocol = "faulty"
    cachable = False
    operations: ClassVar[int] = 0
    fails_at: ClassVar[int | None] = None
    kills_at: ClassVar[int | None] = None
    loses_bytes: ClassVar[bool] = False

    @classmethod
    def reset(cls, **faults: Any) -> None:
        cls.operations, cls.fails_at, cls.kills_at, cls.loses_bytes = 0, None, None, False
        for name, value in faults.items():
            setattr(cls, name, value)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(os.fspath(path).removeprefix("faulty://"))

    @classmethod
    def _operate(cls) -> None:
        cls.operations += 1
        if cls.operations == cls.kills_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if cls.operations == cls.fails_at:
            raise ConnectionResetError("the store is gone")

    def pipe_file(self, path, value, **kwargs):
        self._operate()
        temporary = f"{self._strip_protocol(path)}.new"  # an object is replaced in one step
        super().pipe_file(temporary, value)
        os.replace(temporary, self._strip_protocol(path))

    def put_file(self, lpath, rpath, **kwargs):
        self._operate()
        super().put_file(lpath, rpath)
        if self.loses_bytes:
            os.truncate(self._strip_protocol(rpath), 10)

    def rm(self, path, recursive=False, maxdepth=None):
        self._operate()
        super().rm(path, recursive=recursive)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)
