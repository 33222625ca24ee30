"""Built-in callbacks. The events they respond to are listed in the docstring of :class:`TrainerCallback`.

The default callbacks are imported with the package, all others on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytorch_accel_lite.callbacks.advice import AdviceCallback
from pytorch_accel_lite.callbacks.devices import MoveModulesToDeviceCallback
from pytorch_accel_lite.callbacks.progress import LogMetricsCallback, PrintProgressCallback, ProgressBarCallback
from pytorch_accel_lite.callbacks.stopping import EarlyStoppingCallback, TerminateOnNaNCallback, TimeLimitCallback
from pytorch_accel_lite.callbacks.table import ProgressTableCallback
from pytorch_accel_lite.events import (
    CallbackHandler,
    CallbackMethodNotImplementedError,
    NonFiniteLossError,
    RunInterruptedError,
    RunPausedError,
    StopTrainingError,
    TrainerCallback,
)
from pytorch_accel_lite.lazy import loaded_when_named

if TYPE_CHECKING:
    from pytorch_accel_lite.callbacks.batch_norm import ConvertSyncBatchNormCallback
    from pytorch_accel_lite.callbacks.best_model import SaveBestModelCallback
    from pytorch_accel_lite.callbacks.ema import ModelEmaCallback
    from pytorch_accel_lite.callbacks.evaluation import StepBasedEvaluationCallback
    from pytorch_accel_lite.callbacks.failures import OutOfMemoryCallback, SkipFailedBatchesCallback
    from pytorch_accel_lite.callbacks.hang_watch import HangWatchCallback
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
    from pytorch_accel_lite.callbacks.nan_report import NaNReportCallback
    from pytorch_accel_lite.callbacks.outputs import LogOutputsCallback
    from pytorch_accel_lite.callbacks.plots import PlotMetricsCallback, SnapshotCallback
    from pytorch_accel_lite.callbacks.prediction_writer import PredictionWriterCallback, read_predictions
    from pytorch_accel_lite.callbacks.replicas import ReplicaCheckCallback
    from pytorch_accel_lite.callbacks.run_log import RunLogCallback
    from pytorch_accel_lite.callbacks.spikes import GradientSpikeCallback
    from pytorch_accel_lite.callbacks.timing import ProfilerCallback, TimingCallback
    from pytorch_accel_lite.callbacks.trackers import TrackerCallback
    from pytorch_accel_lite.callbacks.training_states import KeepBest, SaveTrainingStateCallback
    from pytorch_accel_lite.callbacks.unfreezing import GradualUnfreezingCallback
    from pytorch_accel_lite.callbacks.worst_samples import WorstSamplesCallback
    from pytorch_accel_lite.callbacks.wsd import WSDCheckpointCallback
    from pytorch_accel_lite.ema import ModelEma as ModelEma  # the ancestor's users import it from here, too
    from pytorch_accel_lite.tools.replay import replay

__all__ = [
    "DEFAULT_CALLBACKS",
    "AdviceCallback",
    "CallbackHandler",
    "CallbackMethodNotImplementedError",
    "ConvertSyncBatchNormCallback",
    "DeviceMemoryCallback",
    "EarlyStoppingCallback",
    "GradientNormCallback",
    "GradientSpikeCallback",
    "GradualUnfreezingCallback",
    "HangWatchCallback",
    "KeepBest",
    "LearningRateMonitorCallback",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "LogMetricsCallback",
    "LogOutputsCallback",
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
    "ProgressTableCallback",
    "ReplicaCheckCallback",
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


_LOADED_WHEN_NAMED = {
    "batch_norm": ("ConvertSyncBatchNormCallback",),
    "best_model": ("SaveBestModelCallback",),
    "ema": ("ModelEmaCallback",),
    "evaluation": ("StepBasedEvaluationCallback",),
    "failures": ("OutOfMemoryCallback", "SkipFailedBatchesCallback"),
    "hang_watch": ("HangWatchCallback",),
    "limits": ("LimitBatchesCallback", "LimitEvalStepsCallback"),
    "metrics": ("MetricsCallback",),
    "metrics_file": ("MetricsFileCallback",),
    "monitoring": (
        "DeviceMemoryCallback",
        "GradientNormCallback",
        "LearningRateMonitorCallback",
        "LossScaleCallback",
        "ModelSummaryCallback",
        "ThroughputCallback",
    ),
    "nan_report": ("NaNReportCallback",),
    "outputs": ("LogOutputsCallback",),
    "plots": ("PlotMetricsCallback", "SnapshotCallback"),
    "prediction_writer": ("PredictionWriterCallback", "read_predictions"),
    "replicas": ("ReplicaCheckCallback",),
    "run_log": ("RunLogCallback",),
    "spikes": ("GradientSpikeCallback",),
    "timing": ("ProfilerCallback", "TimingCallback"),
    "trackers": ("TrackerCallback",),
    "training_states": ("KeepBest", "SaveTrainingStateCallback"),
    "unfreezing": ("GradualUnfreezingCallback",),
    "worst_samples": ("WorstSamplesCallback",),
    "wsd": ("WSDCheckpointCallback",),
}
__getattr__ = loaded_when_named(
    __name__,
    {name: f"{__name__}.{module}" for module, names in _LOADED_WHEN_NAMED.items() for name in names}
    | {"ModelEma": "pytorch_accel_lite.ema", "replay": "pytorch_accel_lite.tools.replay"},
)


def __dir__() -> list[str]:
    return __all__


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """Return the callbacks that a trainer uses by default.

    :param progress_bar: include :class:`ProgressBarCallback`
    """
    bar: tuple[type[TrainerCallback], ...] = (ProgressBarCallback,) if progress_bar else ()
    return (MoveModulesToDeviceCallback, TerminateOnNaNCallback, ProgressTableCallback, *bar, AdviceCallback)


class _DefaultCallbacks(tuple[type[TrainerCallback], ...]):
    """A tuple that shows as one word when it is a default value in a signature."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "DEFAULT_CALLBACKS"

    def __str__(self) -> str:
        return f"({', '.join(callback.__name__ for callback in self)})"


DEFAULT_CALLBACKS = _DefaultCallbacks(get_default_callbacks())
