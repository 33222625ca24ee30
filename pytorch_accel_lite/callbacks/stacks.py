"""Where threads are: in a line, and in full."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from pytorch_accel_lite.base.environment import LIBRARIES

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d")
# What a run is doing while a function of this package is on the stack, the first match of each frame from outside in.
_ACTIVITIES = (
    ("engine/step.py", "forward", "forward pass"),
    ("engine/step.py", "backward", "backward pass"),
    ("engine/step.py", "update", "update"),
    ("engine/evaluation.py", "", "evaluation"),
    ("distributed/stop_coordinator.py", "", "agreeing on requests to stop"),
    ("engine/replicas.py", "", "comparing replicas"),
    ("data/", "", "reading data"),
    ("checkpoint/", "", "saving or loading"),
)


def stack_of(thread: int | None) -> list[traceback.FrameSummary]:
    """Return the frames of a thread, outermost first; an empty list if it has ended."""
    frame = sys._current_frames().get(thread or 0)
    return [] if frame is None else list(traceback.extract_stack(frame))


def where(stack: Sequence[traceback.FrameSummary]) -> str:
    """Describe the end of a stack in a few words: what the run is doing, the function, file and line.

    A function of a library is followed by the user's function that called it, if the user's code is within the run.
    """
    if not stack:
        return "its thread has ended"
    ours = [place for place, frame in enumerate(stack) if frame.filename.startswith(_PACKAGE)]
    activities = list(filter(None, (_activity(stack[place]) for place in ours)))
    doing = f"{activities[-1]}, " if activities else ""
    if any(frame.name == "_try_get_data" for frame in stack):  # of torch's DataLoader
        doing += "waiting for its workers, "
    last = stack[-1]
    said = f"{doing}in {_named(last)}"
    within = stack[ours[0] :] if ours else []
    callers = [frame for frame in within if not is_library(frame)]
    if is_library(last) and callers:
        said += f", called by {_named(callers[-1])}"
    return said


def waits_for_others(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether a thread is, as far as its stack shows, where processes wait for each other."""
    return any(frame.name == "_engine_run_backward" or _COLLECTIVES in frame.filename for frame in stack)


def _activity(frame: traceback.FrameSummary) -> str:
    file = frame.filename[len(_PACKAGE) :].replace(os.sep, "/")
    return next((said for part, name, said in _ACTIVITIES if file.startswith(part) and name in ("", frame.name)), "")


def _named(frame: traceback.FrameSummary) -> str:
    return f"{frame.name} of {os.path.basename(frame.filename)}:{frame.lineno}"


def is_library(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of this package or an installed one, rather than of the user's code."""
    name = frame.filename
    return name.startswith((_PACKAGE, "<")) or os.path.realpath(name).startswith(LIBRARIES)
