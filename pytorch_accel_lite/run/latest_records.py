"""Records of the latest training, evaluation and loading of weights, which outlive their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pytorch_accel_lite.data.sources import NamedData
from pytorch_accel_lite.run.ending import RunEnd
from pytorch_accel_lite.run.history import MetricValue
from pytorch_accel_lite.run.request_and_config import TrainerRunConfig
from pytorch_accel_lite.run.run_data import DataArguments


class TrainingRecord(NamedTuple):
    """The record of a training run for later evaluations.

    Attributes:
        config: the settings of the run
        end: how it ended
        eval_arguments: what it evaluated on, and how it was read
    """

    config: TrainerRunConfig
    end: RunEnd
    eval_arguments: DataArguments


class EvaluationRecord(NamedTuple):
    """The result of ``Trainer.evaluate()`` for the weights that the model has after a run.

    Attributes:
        eval_dataset: what it evaluated on
        metrics: the latest values, by metric
    """

    eval_dataset: NamedData | None
    metrics: Mapping[str, MetricValue]


class LoadedWeights(NamedTuple):
    """Weights that were loaded into the model.

    Args:
        file: name of the file or directory
        numbers: the numbers in the file, such as the epoch and the metric of a best model
        update: the number of updates of the run when the weights were loaded
    """

    file: str
    numbers: dict[str, float]
    update: int


@dataclass(slots=True, eq=False, repr=False)
class LatestRecords:
    """The latest records of a trainer, which each run takes over from the run before.

    Attributes:
        training: the latest training: this run, or the run before this evaluation
        evaluation: the latest evaluation after that training, if no other weights were loaded since
        loaded: the weights that were loaded last
        recorded_by_evaluate: indices of the values that ``evaluate()`` has recorded in the history, by metric
    """

    training: TrainingRecord | None = None
    evaluation: EvaluationRecord | None = None
    loaded: LoadedWeights | None = None
    recorded_by_evaluate: dict[str, set[int]] = field(default_factory=dict)
