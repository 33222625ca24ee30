"""What shows the output of a program: a terminal, a notebook, or neither."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def in_notebook() -> bool:
    """Whether this program runs in an IPython kernel that shows displays, rather than merely importing IPython.

    In processes forked by a kernel, as by Accelerate's ``notebook_launcher``, Jupyter shows only text.
    """
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython and ipython.get_ipython(), "kernel", None)
    session = getattr(kernel, "session", None)
    return kernel is not None and getattr(session, "pid", os.getpid()) == os.getpid()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; ``None`` is not one."""
    return bool(stream is not None and stream.isatty())


def shows_live(stream: TextIO | None) -> bool:
    """Whether what is written to a stream is watched as it appears, in a notebook or a terminal, not kept as lines."""
    return in_notebook() or is_terminal(stream)
