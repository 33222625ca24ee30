"""Finding out from a thread's stack whether it waits for other processes, and in which kind of collective."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from pathlib import Path
from types import FrameType

from pytorch_accel_lite.extending import Stack
from pytorch_accel_lite.extension_tools.processes import ControlGroup, is_in_backward, is_library_frame
from pytorch_accel_lite.utils import result_of_first

_OURS = os.fspath(Path(__file__).parents[2]) + os.sep
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d")
_EXCHANGE = inspect.getfile(ControlGroup)
_METHODS = inspect.getfile(result_of_first)  # has the methods with which users communicate


def stack_of(thread: int | None) -> list[traceback.FrameSummary]:
    """Return the frames of a thread, outermost first; an empty list if it has ended."""
    frame = sys._current_frames().get(thread or 0)
    return [] if frame is None else list(traceback.extract_stack(frame))


def waits_for_others(stack: Stack) -> bool:
    """Whether the stack of a thread shows that it waits for other processes."""
    return any(_is_collective(frame.name, frame.filename) for frame in stack)


def is_waiting(thread: int) -> bool:
    """Whether a thread waits for other processes."""
    return signature(sys._current_frames().get(thread))[1]


def is_own_collective(stack: Stack) -> bool:
    """Whether a thread waits for other processes because the user's code itself called a collective."""
    users = [index for index, frame in enumerate(stack) if not is_library_frame(frame)]
    following = [frame.filename for frame in stack[users[-1] + 1 :]] if users else []
    return _METHODS in following or not any(name.startswith(_OURS) for name in following)


def kind_of_wait(stack: Stack) -> str:
    """Return the kind of collective in which a thread waits. Collectives of different kinds never match."""
    if any(frame.filename == _EXCHANGE for frame in stack):
        return "exchange"
    return "backward" if is_in_backward(stack) else stack[-1].name


def signature(frame: FrameType | None) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Return an identifier of the position of a thread, and whether the thread waits for other processes."""
    places = []
    waits = False
    while frame is not None:
        places.append((id(frame), frame.f_lasti))
        waits = waits or _is_collective(frame.f_code.co_name, frame.f_code.co_filename)
        frame = frame.f_back
    return tuple(places), waits


def _is_collective(function: str, filename: str) -> bool:
    return function == "_engine_run_backward" or filename == _EXCHANGE or _COLLECTIVES in filename
