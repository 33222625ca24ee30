"""Paths that belong to one callback."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


class OwnsPath(Protocol):
    """A callback that writes where no other may write; ``path_argument`` names its argument with the path."""

    path_argument: str


def refuse_shared_path(trainer: Trainer, callback: OwnsPath) -> None:
    """Raise an error when another callback would write to the same path.

    :raises ValueError: names the argument, the path and both callbacks
    """
    path, others = _path_of(callback), list[object](trainer.callback_handler)
    for other in others:
        if other is not callback and path is not None and _path_of(other) == path:
            argument, kinds = callback.path_argument, f"{type(callback).__name__} and {type(other).__name__}"
            raise ValueError(
                f"{argument}={os.fspath(getattr(callback, argument))!r} is that of two callbacks, {kinds}, which would "
                "overwrite each other's files. Give each a path of its own."
            )


def _path_of(callback: object) -> str | None:
    path = getattr(callback, getattr(callback, "path_argument", ""), None)
    return None if path is None else os.path.realpath(path)
