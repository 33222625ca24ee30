"""A pseudo-terminal of a given width, and the screen that it shows."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminal:
    """A pseudo-terminal. What is written to it is read by a thread, and shown on a screen without an end."""

    def __init__(self, columns: int, monkeypatch: Any) -> None:
        self._monkeypatch = monkeypatch
        self._master, self._slave = os.openpty()
        self.resize(columns)
        self._written = b""
        self._reader = threading.Thread(target=self._read)

    def resize(self, columns: int) -> None:
        """Give the window another width."""
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._monkeypatch.setenv("COLUMNS", str(columns))  # where Python asks another stream than the tests replace
        os.write(self._slave, f"\x1b[{columns}W".encode())  # for the screen: from here on

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self._written += data
        except OSError:  # the end, on Linux
            pass

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Let the program write to it."""
        self._reader.start()
        with (
            os.fdopen(os.dup(self._slave), "w", buffering=1) as out,
            os.fdopen(os.dup(self._slave), "w") as err,
            self._monkeypatch.context() as patch,
        ):
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            yield
            assert (sys.stdout, sys.stderr) == (out, err)
        os.close(self._slave)
        self._reader.join(10)
        os.close(self._master)

    @property
    def written(self) -> str:
        """All that was written, with the moves of the cursor."""
        return self._written.decode()

    @property
    def shown(self) -> list[str]:
        """The lines that are on the screen in the end."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|[\r\n]|[^\r\n\x1b]+", self.written):
            if part == "\r":
                column = 0
            elif part == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif part.endswith("A") and part.startswith("\x1b"):
                row -= int(part[2:-1] or 1)
            elif part.endswith("W") and part.startswith("\x1b"):  # the line of the cursor wraps, as in most terminals
                width = int(part[2:-1])
                wrapped = [lines[row][start : start + width] for start in range(0, len(lines[row]), width)] or [""]
                lines[row : row + 1] = wrapped
                row += len(wrapped) - 1
                column = len(lines[row])
            elif part == "\x1b[K":
                lines[row] = lines[row][:column]
            elif part == "\x1b[J":
                lines[row:] = [lines[row][:column]]
            elif part.startswith("\x1b"):
                raise AssertionError(f"The screen does not know {part!r}.")
            else:
                lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines]
