"""The processes of a job: messages, time limits, where they wait and which are lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.accelerator import current_process
from pytorch_accel_lite.distributed.control_group import ControlGroup
from pytorch_accel_lite.distributed.launched_processes import die_with_parent
from pytorch_accel_lite.distributed.lost_processes import is_about_lost_process
from pytorch_accel_lite.distributed.message_encoding import Message, decode
from pytorch_accel_lite.distributed.ranks import chosen_timeout, find_ranks, set_timeout, timeout_of, use_ranks
from pytorch_accel_lite.distributed.shard_holders import Holders, current_holders, use_holders
from pytorch_accel_lite.distributed.shutdown import open_trainers
from pytorch_accel_lite.distributed.stack_frames import (
    MACHINERY,
    describe_call,
    describe_frame,
    innermost_function,
    is_in_backward,
    is_library_frame,
)

__all__ = [
    "ControlGroup", "Holders", "MACHINERY", "Message", "Ranks", "chosen_timeout", "current_holders", "current_process",
    "decode", "describe_call", "describe_frame", "die_with_parent", "innermost_function", "is_in_backward",
    "is_library_frame", "names_connection", "open_trainers", "set_timeout", "timeout_of", "use_holders", "use_ranks",
]  # fmt: skip

T = TypeVar("T")


def names_connection(error: BaseException) -> bool:
    """Whether an error of torch names a connection to another process, even if it does not say that it was lost."""
    text = str(error)
    return is_about_lost_process(error) or "gloo" in text.lower() or "Connection" in text


def result_of_first(make: Callable[[], T]) -> T:
    """Return the result of ``make``, which only rank 0 calls, on every rank; also before the trainer is created.

    With a single process, this does not initialise Accelerate, which is up to the trainer.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return make()
    return find_ranks(current_process()).result_of_first(make)
