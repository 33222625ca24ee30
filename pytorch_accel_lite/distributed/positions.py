"""Finding out from a thread's stack in which call of the user's code it is, and whether it waits for others."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from pytorch_accel_lite.base.origins import LIBRARIES

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d")
_EXCHANGE = _HERE + "exchange.py"
#: Files whose functions carry out collectives for other code. Extensions may add files.
MACHINERY = {_EXCHANGE, _HERE + "ranks.py", _HERE + "layout.py"}
_AT_THE_END = _HERE + "shutdown.py"
_WRAPPERS = os.path.join(_PACKAGE, "base", "unknown_names.py")  # wraps methods to check their arguments
_METHODS = os.path.join(_PACKAGE, "loop", "collectives.py")  # methods with which users communicate

Stack = Sequence[traceback.FrameSummary]


def stack_of(thread: int | None) -> list[traceback.FrameSummary]:
    """Return the frames of a thread, outermost first; an empty list if it has ended."""
    frame = sys._current_frames().get(thread or 0)
    return [] if frame is None else list(traceback.extract_stack(frame))


def innermost_function(stack: Stack) -> str:
    """Return the function at the end of a stack, with its file and line.

    A function of a library is followed by the user's function that called it, if the user's code is within the run.
    """
    stack = [frame for frame in stack if frame.filename not in MACHINERY]
    if not stack:
        return "its thread has ended"
    ours = [index for index, frame in enumerate(stack) if frame.filename.startswith(_PACKAGE)]
    callers = [frame for frame in stack[ours[0] :] if not is_library(frame)] if ours else []
    called_by = f", called by {named(callers[-1])}" if callers and is_library(stack[-1]) else ""
    return f"in {named(stack[-1])}{called_by}"


def describe_call(stack: Stack) -> str:
    """Return the call in the user's code in which a thread is, with the line, and the innermost function in it.

    For example ``in evaluate(), called by on_train_step_end of train.py:12 (check_same_call of arguments.py:3)``.
    """
    if any(frame.filename == _AT_THE_END for frame in stack):
        return "at the end of its program"
    users = [index for index, frame in enumerate(stack) if not is_library(frame)]
    if not users or users[-1] == len(stack) - 1:
        return innermost_function(stack)
    caller, called, *inner = (frame for frame in stack[users[-1] :] if frame.filename != _WRAPPERS)
    inner = [frame for frame in inner if frame.filename not in MACHINERY]
    ours = [frame for frame in inner if frame.filename.startswith(_PACKAGE)]
    place = f" ({'in the backward pass, ' * _is_in_backward(stack)}{named((ours or inner)[-1])})" if inner else ""
    return f"in {called.name}(), called by {named(caller)}{place}"


def waits_for_others(stack: Stack) -> bool:
    """Whether the stack of a thread shows that it waits for other processes."""
    return any(_is_collective(frame.name, frame.filename) for frame in stack)


def is_waiting(thread: int) -> bool:
    """Whether a thread waits for other processes."""
    return signature(sys._current_frames().get(thread))[1]


def is_own_collective(stack: Stack) -> bool:
    """Whether a thread waits for other processes because the user's code itself called a collective."""
    users = [index for index, frame in enumerate(stack) if not is_library(frame)]
    following = [frame.filename for frame in stack[users[-1] + 1 :]] if users else []
    return _METHODS in following or not any(name.startswith(_PACKAGE) for name in following)


def kind_of_wait(stack: Stack) -> str:
    """Return the kind of collective in which a thread waits. Collectives of different kinds never match."""
    if is_in_exchange(stack):
        return "exchange"
    return "backward" if _is_in_backward(stack) else stack[-1].name


def is_in_exchange(stack: Stack) -> bool:
    """Whether a thread waits in an exchange, which raises an error if the connection to another process ends."""
    return any(frame.filename == _EXCHANGE for frame in stack)


def signature(frame: FrameType | None) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Return an identifier of the position of a thread, and whether the thread waits for other processes."""
    places = []
    waits = False
    while frame is not None:
        places.append((id(frame), frame.f_lasti))
        waits = waits or _is_collective(frame.f_code.co_name, frame.f_code.co_filename)
        frame = frame.f_back
    return tuple(places), waits


def named(frame: traceback.FrameSummary) -> str:
    """Return the function, file and line of a frame."""
    return f"{frame.name} of {os.path.basename(frame.filename)}:{frame.lineno}"


def is_library(frame: traceback.FrameSummary) -> bool:
    """Whether a frame belongs to this package or an installed one, rather than to the user's code."""
    name = frame.filename
    return name.startswith((_PACKAGE, "<")) or os.path.realpath(name).startswith(LIBRARIES)


def _is_collective(function: str, filename: str) -> bool:
    return function == "_engine_run_backward" or filename == _EXCHANGE or _COLLECTIVES in filename


def _is_in_backward(stack: Stack) -> bool:
    return any(frame.name == "_engine_run_backward" for frame in stack)
