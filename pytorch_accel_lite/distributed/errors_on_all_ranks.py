"""An error on one process becomes an error on all: what ``Ranks.run_together()`` sends of an action, and raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from pytorch_accel_lite.distributed.message_encoding import encode
from pytorch_accel_lite.distributed.stack_frames import MACHINERY

MACHINERY.add(__file__)
T = TypeVar("T")
#: The result of an action on a rank, if any, and its error as the other ranks raise it.
Outcome: TypeAlias = tuple[Any, Exception | None]


class Attempt(NamedTuple):
    """An action that ``Ranks.run_together()`` has run on this rank.

    Args:
        outcome: its outcome, for all ranks
        encoded: the outcome, encoded for a message
        error: the error that it raised on this rank
    """

    outcome: Outcome
    encoded: torch.Tensor
    error: Exception | None


def try_action(action: Callable[[], T | None], rank: int) -> Attempt:
    """Run an action on this rank, and encode its result, or an error that quotes the error of this rank.

    Args:
        rank: the rank in the job, which the error names
    """
    try:
        outcome: Outcome = action(), None
        return Attempt(outcome, encode(outcome), None)
    except Exception as error:
        kind = OSError if isinstance(error, OSError) else RuntimeError
        outcome = None, kind(f"Rank {rank} failed: {type(error).__name__}: {error}")
        return Attempt(outcome, encode(outcome), error)


def values_or_first_error(attempt: Attempt, outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the results of all ranks, or raise the error of this rank or else of the first rank that failed.

    Args:
        outcomes: the outcomes of all ranks
    """
    for error in (attempt.error, *(error for _, error in outcomes)):
        if error is not None:
            raise error
    return [value for value, _ in outcomes]
