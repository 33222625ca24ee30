"""Callbacks: what listens to a run. The events are in the docstring of :class:`TrainerCallback`."""

from __future__ import annotations

from pytorch_accel_lite.callbacks.advice import AdviceCallback
from pytorch_accel_lite.callbacks.batch_norm import ConvertSyncBatchNormCallback
from pytorch_accel_lite.callbacks.best_model import SaveBestModelCallback
from pytorch_accel_lite.callbacks.devices import MoveModulesToDeviceCallback
from pytorch_accel_lite.callbacks.ema import ModelEmaCallback
from pytorch_accel_lite.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accel_lite.callbacks.failures import OutOfMemoryCallback, SkipFailedBatchesCallback
from pytorch_accel_lite.callbacks.limits import LimitBatchesCallback, LimitEvalStepsCallback
from pytorch_accel_lite.callbacks.metrics import MetricsCallback
from pytorch_accel_lite.callbacks.metrics_file import MetricsFileCallback
from pytorch_accel_lite.callbacks.monitoring import (
    DeviceMemoryCallback,
    GradientNormCallback,
    LearningRateMonitorCallback,
    LossScaleCallback,
    ModelSummaryCallback,
    ThroughputCallback,
)
from pytorch_accel_lite.callbacks.nan_report import NaNReportCallback, replay
from pytorch_accel_lite.callbacks.pictures import PlotMetricsCallback, SnapshotCallback
from pytorch_accel_lite.callbacks.prediction_writer import PredictionWriterCallback, read_predictions
from pytorch_accel_lite.callbacks.progress import LogMetricsCallback, PrintProgressCallback, ProgressBarCallback
from pytorch_accel_lite.callbacks.run_log import RunLogCallback
from pytorch_accel_lite.callbacks.spikes import GradientSpikeCallback
from pytorch_accel_lite.callbacks.stopping import EarlyStoppingCallback, TerminateOnNaNCallback, TimeLimitCallback
from pytorch_accel_lite.callbacks.timing import ProfilerCallback, TimingCallback
from pytorch_accel_lite.callbacks.trackers import TrackerCallback
from pytorch_accel_lite.callbacks.training_states import KeepBest, SaveTrainingStateCallback
from pytorch_accel_lite.callbacks.unfreezing import GradualUnfreezingCallback
from pytorch_accel_lite.callbacks.worst_samples import WorstSamplesCallback
from pytorch_accel_lite.callbacks.wsd import WSDCheckpointCallback
from pytorch_accel_lite.events import (
    CallbackHandler,
    NonFiniteLossError,
    RunInterruptedError,
    RunPausedError,
    StopTrainingError,
    TrainerCallback,
)

__all__ = [
    "DEFAULT_CALLBACKS",
    "AdviceCallback",
    "CallbackHandler",
    "ConvertSyncBatchNormCallback",
    "DeviceMemoryCallback",
    "EarlyStoppingCallback",
    "GradientNormCallback",
    "GradientSpikeCallback",
    "GradualUnfreezingCallback",
    "KeepBest",
    "LearningRateMonitorCallback",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "LogMetricsCallback",
    "LossScaleCallback",
    "MetricsCallback",
    "MetricsFileCallback",
    "ModelEmaCallback",
    "ModelSummaryCallback",
    "MoveModulesToDeviceCallback",
    "NaNReportCallback",
    "NonFiniteLossError",
    "OutOfMemoryCallback",
    "PlotMetricsCallback",
    "PredictionWriterCallback",
    "PrintProgressCallback",
    "ProfilerCallback",
    "ProgressBarCallback",
    "RunInterruptedError",
    "RunLogCallback",
    "RunPausedError",
    "SaveBestModelCallback",
    "SaveTrainingStateCallback",
    "SkipFailedBatchesCallback",
    "SnapshotCallback",
    "StepBasedEvaluationCallback",
    "StopTrainingError",
    "TerminateOnNaNCallback",
    "ThroughputCallback",
    "TimeLimitCallback",
    "TimingCallback",
    "TrackerCallback",
    "TrainerCallback",
    "WSDCheckpointCallback",
    "WorstSamplesCallback",
    "get_default_callbacks",
    "read_predictions",
    "replay",
]


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """Return the callbacks that a trainer has unless told otherwise.

    :param progress_bar: include :class:`ProgressBarCallback`
    """
    bar: tuple[type[TrainerCallback], ...] = (ProgressBarCallback,) if progress_bar else ()
    first = (MoveModulesToDeviceCallback, TerminateOnNaNCallback, PrintProgressCallback)
    return (*first, *bar, LogMetricsCallback, AdviceCallback)


DEFAULT_CALLBACKS = get_default_callbacks()
