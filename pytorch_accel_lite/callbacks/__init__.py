"""Built-in callbacks. The events they respond to are listed in the docstring of ``TrainerCallback``."""

from __future__ import annotations

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.callbacks.best_model import SaveBestModelCallback
from pytorch_accel_lite.callbacks.default_callbacks import DefaultCallbacks, get_default_callbacks
from pytorch_accel_lite.callbacks.log_metrics import LogMetricsCallback
from pytorch_accel_lite.callbacks.move_modules import MoveModulesToDeviceCallback
from pytorch_accel_lite.callbacks.print_progress import PrintProgressCallback
from pytorch_accel_lite.callbacks.save_training_state import SaveTrainingStateCallback
from pytorch_accel_lite.callbacks.step_evaluation import StepBasedEvaluationCallback
from pytorch_accel_lite.callbacks.stopping import EarlyStoppingCallback, TimeLimitCallback
from pytorch_accel_lite.callbacks.terminate_on_nan import TerminateOnNaNCallback
from pytorch_accel_lite.extensions.advice import AdviceCallback  # adds to DEFAULTS
from pytorch_accel_lite.extensions.energy import EnergyCallback
from pytorch_accel_lite.extensions.failed_batches import SkipFailedBatchesCallback
from pytorch_accel_lite.extensions.gradient_spikes import GradientSpikeCallback
from pytorch_accel_lite.extensions.hang_watch import HangWatchCallback
from pytorch_accel_lite.extensions.metrics import MetricsCallback  # fills METRICS
from pytorch_accel_lite.extensions.metrics_file import MetricsFileCallback
from pytorch_accel_lite.extensions.mixtures.mixture_schedule_callback import MixtureScheduleCallback
from pytorch_accel_lite.extensions.model_ema import ModelEma as ModelEma  # as in pytorch-accelerated
from pytorch_accel_lite.extensions.model_ema import ModelEmaCallback
from pytorch_accel_lite.extensions.model_summary import ModelSummaryCallback
from pytorch_accel_lite.extensions.momentum_teacher import MomentumTeacherCallback
from pytorch_accel_lite.extensions.monitoring import (
    DeviceMemoryCallback,
    GradientNormCallback,
    LearningRateMonitorCallback,
    LossScaleCallback,
)
from pytorch_accel_lite.extensions.named_schedules.wsd_checkpoint_callback import WSDCheckpointCallback
from pytorch_accel_lite.extensions.nan_report import NaNReportCallback
from pytorch_accel_lite.extensions.predictions import PredictionWriterCallback, iterate_predictions, read_predictions
from pytorch_accel_lite.extensions.profiling import ProfilerCallback, TimingCallback
from pytorch_accel_lite.extensions.progress_bar import ProgressBarCallback  # adds to DEFAULTS
from pytorch_accel_lite.extensions.progress_table import ProgressTableCallback  # adds to DEFAULTS
from pytorch_accel_lite.extensions.pytorch_accelerated import (  # adds to ADDED_TO_EACH_TRAINER
    CallbackMethodNotImplementedError,
    LimitBatchesCallback,
    LimitEvalStepsCallback,
)
from pytorch_accel_lite.extensions.reports import PlotMetricsCallback, RunLogCallback, ShowOutputsCallback
from pytorch_accel_lite.extensions.sync_batch_norm import ConvertSyncBatchNormCallback
from pytorch_accel_lite.extensions.throughput import ThroughputCallback
from pytorch_accel_lite.extensions.trackers import TrackerCallback
from pytorch_accel_lite.extensions.unfreezing import GradualUnfreezingCallback
from pytorch_accel_lite.extensions.worst_samples import WorstSample, WorstSamplesCallback
from pytorch_accel_lite.run.callback_handler import CallbackHandler
from pytorch_accel_lite.run.ending import NonFiniteLossError, RunInterruptedError, RunPausedError, StopTrainingError
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.watched_metric import WatchedMetric

__all__ = [
    "CallbackHandler",
    "CallbackMethodNotImplementedError",
    "NonFiniteLossError",
    "RunInterruptedError",
    "RunPausedError",
    "StopTrainingError",
    "TrainerCallback",
    "WatchedMetric",
    "AdviceCallback",
    "SaveBestModelCallback",
    "SkipFailedBatchesCallback",
    "HangWatchCallback",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "MetricsCallback",
    "MetricsFileCallback",
    "MixtureScheduleCallback",
    "ModelEmaCallback",
    "ModelSummaryCallback",
    "MomentumTeacherCallback",
    "DeviceMemoryCallback",
    "EnergyCallback",
    "GradientNormCallback",
    "LearningRateMonitorCallback",
    "LossScaleCallback",
    "MoveModulesToDeviceCallback",
    "GradientSpikeCallback",
    "NaNReportCallback",
    "TerminateOnNaNCallback",
    "ShowOutputsCallback",
    "PlotMetricsCallback",
    "PredictionWriterCallback",
    "iterate_predictions",
    "read_predictions",
    "LogMetricsCallback",
    "PrintProgressCallback",
    "ProgressBarCallback",
    "RunLogCallback",
    "StepBasedEvaluationCallback",
    "EarlyStoppingCallback",
    "TimeLimitCallback",
    "ConvertSyncBatchNormCallback",
    "ProgressTableCallback",
    "ThroughputCallback",
    "ProfilerCallback",
    "TimingCallback",
    "TrackerCallback",
    "SaveTrainingStateCallback",
    "GradualUnfreezingCallback",
    "WorstSample",
    "WorstSamplesCallback",
    "WSDCheckpointCallback",
    "get_default_callbacks",
    "DEFAULT_CALLBACKS",
]

DEFAULT_CALLBACKS = DefaultCallbacks(get_default_callbacks())

add_missing_name_errors(__name__)
