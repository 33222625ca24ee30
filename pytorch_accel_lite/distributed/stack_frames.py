"""Describing from a thread's stack in which call of the user's code it is."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

from pytorch_accel_lite.base.user_code import LIBRARIES, OWN_FILES, WRAPPERS

#: Files whose functions carry out collectives for other code. Each file adds itself, also in extensions.
MACHINERY = set[str]()
#: Files whose functions are called at the end of a program. Each file adds itself.
AT_THE_END = set[str]()

Stack = Sequence[traceback.FrameSummary]


def innermost_function(stack: Stack) -> str:
    """Return the function at the end of a stack, with its file and line.

    A function of a library is followed by the user's function that called it, if the user's code is within the run.
    """
    stack = [frame for frame in stack if frame.filename not in MACHINERY]
    if not stack:
        return "its thread has ended"
    ours = [index for index, frame in enumerate(stack) if frame.filename.startswith(OWN_FILES)]
    callers = [frame for frame in stack[ours[0] :] if not is_library_frame(frame)] if ours else []
    called_by = f", called by {describe_frame(callers[-1])}" if callers and is_library_frame(stack[-1]) else ""
    return f"in {describe_frame(stack[-1])}{called_by}"


def describe_call(stack: Stack) -> str:
    """Return the call in the user's code in which a thread is, with the line, and the innermost function in it.

    For example ``in evaluate(), called by on_train_step_end of train.py:12 (sync of ending.py:3)``.
    """
    if any(frame.filename in AT_THE_END for frame in stack):
        return "at the end of its program"
    users = [index for index, frame in enumerate(stack) if not is_library_frame(frame)]
    if not users or users[-1] == len(stack) - 1:
        return innermost_function(stack)
    caller, called, *inner = (frame for frame in stack[users[-1] :] if frame.filename not in WRAPPERS)
    inner = [frame for frame in inner if frame.filename not in MACHINERY]
    ours = [frame for frame in inner if frame.filename.startswith(OWN_FILES)]
    backward = "in the backward pass, " * is_in_backward(stack)
    place = f" ({backward}{describe_frame((ours or inner)[-1])})" if inner else ""
    return f"in {called.name}(), called by {describe_frame(caller)}{place}"


def describe_frame(frame: traceback.FrameSummary) -> str:
    """Return the function, file and line of a frame."""
    return f"{frame.name} of {os.path.basename(frame.filename)}:{frame.lineno}"


def is_library_frame(frame: traceback.FrameSummary) -> bool:
    """Whether a frame belongs to this package or an installed one, rather than to the user's code."""
    name = frame.filename
    return name.startswith((OWN_FILES, "<")) or os.path.realpath(name).startswith(LIBRARIES)


def is_in_backward(stack: Stack) -> bool:
    """Whether a thread is in a backward pass."""
    return any(frame.name == "_engine_run_backward" for frame in stack)
