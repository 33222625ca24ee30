"""Warnings and errors as users see them: at their own line, with notes, without frames that say nothing to them."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Iterator
from types import TracebackType

from pytorch_accel_lite.base.user_code import is_in_this_package, is_of_library


def warn_outside(message: str) -> None:
    """Warn at the innermost line outside this package, from which the user called it."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001
    while frame.f_back is not None and is_in_this_package(frame.f_globals.get("__name__")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_NOTE_WIDTH = 80
_CALLS_OF_MODULES = "torch.nn.modules.module"


def add_note(error: BaseException, *lines: str) -> None:
    """Add a note to an error, with each line wrapped at 80 columns."""
    shown = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2) if len(lines) > 1 else ""
        shown.append(
            textwrap.fill(line, _NOTE_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        )
    error.add_note("\n".join(shown))


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error."""
    return list(getattr(error, "__notes__", []))


def leave_out_libraries(error: BaseException) -> None:
    """Remove the frames of libraries from the traceback of an error, except the first frame, the caller of this."""
    trace = error.__traceback__
    while trace is not None:
        following = trace.tb_next
        while trace.tb_next is not None and is_of_library(trace.tb_next.tb_frame.f_globals.get("__name__")):
            trace.tb_next = trace.tb_next.tb_next
        trace = following
    error.__suppress_context__ = True


def hide_frames(error: BaseException) -> None:
    """In IPython, remove from a traceback this package's frames, and torch's frames that only call modules.

    The remaining frames are the user's, the frames that these have called, and the check that raised the error. All
    frames stay if the error comes from code of this package that is not a check.
    """
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return
    chain: list[BaseException] = []
    part: BaseException | None = error
    while part is not None and part not in chain:
        chain.append(part)
        *_, innermost = _entries(part)
        is_check = isinstance(part, (ValueError, TypeError, RuntimeError))
        if is_check or not is_in_this_package(_module_of(innermost)):
            for trace in _entries(part):
                following = trace.tb_next
                while following is not None and following is not innermost and _is_hidden(_module_of(following)):
                    following = following.tb_next
                trace.tb_next = following
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)


def _entries(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _module_of(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__"))


def _is_hidden(module: str) -> bool:
    return is_in_this_package(module) or module == _CALLS_OF_MODULES
