"""What is told of a failed batch, and the errors of which a batch is not the cause."""

from __future__ import annotations

from pytorch_accel_lite.extending import NonFiniteLossError, OtherCallError, ProcessLostError, Run, StopTrainingError
from pytorch_accel_lite.extending_callbacks import Failure

#: Errors that end a run whatever it skips: a batch is not their cause.
NEVER_SKIPPED = (StopTrainingError, NonFiniteLossError, OtherCallError, ProcessLostError)


def describe_failure(run: Run, error: Exception) -> Failure:
    """Return what callbacks are told of a batch that has failed on this process."""
    return {"rank": run.ranks.rank, "indices": run.batch_indices, "error": f"{type(error).__name__}: {error}"}
