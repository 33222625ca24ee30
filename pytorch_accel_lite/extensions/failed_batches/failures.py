"""The record that callbacks get of a failed batch, and the errors that are never skipped."""

from __future__ import annotations

from pytorch_accel_lite.extending import NonFiniteLossError, OtherCallError, ProcessLostError, Run, StopTrainingError
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Failure

#: Errors that are not caused by a batch, and therefore always end the run.
NEVER_SKIPPED = (StopTrainingError, NonFiniteLossError, OtherCallError, ProcessLostError)


def describe_failure(run: Run, error: Exception) -> Failure:
    """Return the record of a batch that has failed on this process, for callbacks."""
    return {"rank": run.ranks.rank, "indices": run.batch_indices, "error": f"{type(error).__name__}: {error}"}
