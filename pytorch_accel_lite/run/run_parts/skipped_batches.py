"""The batches that an evaluation or a prediction skips because they fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.run.events import Failure

#: Stands for the output of a batch that was skipped.
SKIPPED = object()


class SkippedStep(NamedTuple):
    """A batch that was skipped in an evaluation or a prediction.

    Args:
        failure: the failure, as callbacks are told about it
        step: the number of the batch on its process, from 0
        samples: number of samples in the batch, or ``None`` if unknown
    """

    failure: Failure
    step: int
    samples: int | None


@dataclass(slots=True, eq=False, repr=False)
class SkippedBatches:
    """The batches that are skipped in an evaluation or a prediction because their steps failed.

    Attributes:
        phase: whether the batches belong to an evaluation or a prediction
        batches: the batches of this process; after gathering, those of all processes
        is_gathered: whether the batches of all processes have been gathered
        first_error: the first error of this process
        last_computed: the last batch of this process that did not fail
    """

    phase: Literal["evaluation", "prediction"]
    batches: list[SkippedStep] = field(default_factory=list)
    is_gathered: bool = False
    first_error: Exception | None = None
    last_computed: Batch | None = None
