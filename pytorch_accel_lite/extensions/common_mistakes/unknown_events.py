"""Warning of methods of callbacks that are called almost like an event, or like an event of another library.

Of the two methods for its state, a callback needs both or none.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytorch_accel_lite.extending import TrainerCallback
from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    events_meant,
    is_from_this_package,
    suggest,
    warn_outside,
)
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import EVENTS


def warn_of_unknown_events(objects: Iterable[object]) -> None:
    """Warn of methods of callbacks that no event calls, although they are named like one."""
    for kind in dict.fromkeys(type(one) for one in objects if isinstance(one, TrainerCallback)):
        _warn_of_half_a_state(kind)
        for name in dir(kind):
            is_like_one = name not in EVENTS and (name.startswith("on_") or bool(events_meant(name)))
            method = getattr(kind, name) if is_like_one else None
            if callable(method) and not is_from_this_package(method):
                hint = suggest(name, [*EVENTS, "state_dict", "load_state_dict"], cutoff=0.88)
                if hint:
                    warn_outside(
                        f"{kind.__name__}.{name} is not an event of the trainer: it is called only if your program "
                        f"does.{hint}"
                    )


def _warn_of_half_a_state(kind: type[TrainerCallback]) -> None:
    saves, restores = hasattr(kind, "state_dict"), hasattr(kind, "load_state_dict")
    if saves != restores:
        has, lacks = ("state_dict()", "load_state_dict(state)")[:: 1 if saves else -1]
        warn_outside(f"{kind.__name__} has {has}, but no {lacks}, so a resumed run does not restore its state.")
