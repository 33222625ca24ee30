"""Built-in callbacks. The events they respond to are listed in the docstring of :class:`TrainerCallback`."""

from __future__ import annotations

from pytorch_accel_lite.base.events import CallbackHandler as CallbackHandler
from pytorch_accel_lite.base.events import CallbackMethodNotImplementedError as CallbackMethodNotImplementedError
from pytorch_accel_lite.base.events import NonFiniteLossError as NonFiniteLossError
from pytorch_accel_lite.base.events import RunInterruptedError as RunInterruptedError
from pytorch_accel_lite.base.events import RunPausedError as RunPausedError
from pytorch_accel_lite.base.events import StopTrainingError as StopTrainingError
from pytorch_accel_lite.base.events import TrainerCallback as TrainerCallback
from pytorch_accel_lite.base.validation import check_bool
from pytorch_accel_lite.base.watched_metric import WatchedMetric as WatchedMetric
from pytorch_accel_lite.callbacks.advice import AdviceCallback as AdviceCallback
from pytorch_accel_lite.callbacks.best_model import SaveBestModelCallback as SaveBestModelCallback
from pytorch_accel_lite.callbacks.failures import SkipFailedBatchesCallback as SkipFailedBatchesCallback
from pytorch_accel_lite.callbacks.hang_watch import HangWatchCallback as HangWatchCallback
from pytorch_accel_lite.callbacks.limits import LimitBatchesCallback as LimitBatchesCallback
from pytorch_accel_lite.callbacks.limits import LimitEvalStepsCallback as LimitEvalStepsCallback
from pytorch_accel_lite.callbacks.metrics import MetricsCallback as MetricsCallback
from pytorch_accel_lite.callbacks.metrics_file import MetricsFileCallback as MetricsFileCallback
from pytorch_accel_lite.callbacks.model_ema import ModelEmaCallback as ModelEmaCallback
from pytorch_accel_lite.callbacks.model_summary import ModelSummaryCallback as ModelSummaryCallback
from pytorch_accel_lite.callbacks.monitoring import DeviceMemoryCallback as DeviceMemoryCallback
from pytorch_accel_lite.callbacks.monitoring import GradientNormCallback as GradientNormCallback
from pytorch_accel_lite.callbacks.monitoring import LearningRateMonitorCallback as LearningRateMonitorCallback
from pytorch_accel_lite.callbacks.monitoring import LossScaleCallback as LossScaleCallback
from pytorch_accel_lite.callbacks.move_modules import MoveModulesToDeviceCallback as MoveModulesToDeviceCallback
from pytorch_accel_lite.callbacks.non_finite import GradientSpikeCallback as GradientSpikeCallback
from pytorch_accel_lite.callbacks.non_finite import NaNReportCallback as NaNReportCallback
from pytorch_accel_lite.callbacks.non_finite import TerminateOnNaNCallback as TerminateOnNaNCallback
from pytorch_accel_lite.callbacks.outputs import ShowOutputsCallback as ShowOutputsCallback
from pytorch_accel_lite.callbacks.plot_metrics import PlotMetricsCallback as PlotMetricsCallback
from pytorch_accel_lite.callbacks.prediction_writer import PredictionWriterCallback as PredictionWriterCallback
from pytorch_accel_lite.callbacks.prediction_writer import iterate_predictions as iterate_predictions
from pytorch_accel_lite.callbacks.prediction_writer import read_predictions as read_predictions
from pytorch_accel_lite.callbacks.printing import LogMetricsCallback as LogMetricsCallback
from pytorch_accel_lite.callbacks.printing import PrintProgressCallback as PrintProgressCallback
from pytorch_accel_lite.callbacks.progress_bar import ProgressBarCallback as ProgressBarCallback
from pytorch_accel_lite.callbacks.run_log import RunLogCallback as RunLogCallback
from pytorch_accel_lite.callbacks.step_evaluation import StepBasedEvaluationCallback as StepBasedEvaluationCallback
from pytorch_accel_lite.callbacks.stopping import EarlyStoppingCallback as EarlyStoppingCallback
from pytorch_accel_lite.callbacks.stopping import TimeLimitCallback as TimeLimitCallback
from pytorch_accel_lite.callbacks.sync_batch_norm import ConvertSyncBatchNormCallback as ConvertSyncBatchNormCallback
from pytorch_accel_lite.callbacks.table import ProgressTableCallback as ProgressTableCallback
from pytorch_accel_lite.callbacks.throughput import ThroughputCallback as ThroughputCallback
from pytorch_accel_lite.callbacks.timing import ProfilerCallback as ProfilerCallback
from pytorch_accel_lite.callbacks.timing import TimingCallback as TimingCallback
from pytorch_accel_lite.callbacks.trackers import TrackerCallback as TrackerCallback
from pytorch_accel_lite.callbacks.training_states import SaveTrainingStateCallback as SaveTrainingStateCallback
from pytorch_accel_lite.callbacks.unfreezing import GradualUnfreezingCallback as GradualUnfreezingCallback
from pytorch_accel_lite.callbacks.worst_samples import WorstSamplesCallback as WorstSamplesCallback
from pytorch_accel_lite.callbacks.wsd import WSDCheckpointCallback as WSDCheckpointCallback
from pytorch_accel_lite.optimizers.moving_averages import ModelEma as ModelEma  # as in pytorch-accelerated


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """Return the callbacks that a trainer uses by default.

    :param progress_bar: include :class:`ProgressBarCallback`
    """
    is_shown = check_bool("progress_bar", progress_bar)
    bar: tuple[type[TrainerCallback], ...] = (ProgressBarCallback,) if is_shown else ()
    return _Callbacks(
        (MoveModulesToDeviceCallback, TerminateOnNaNCallback, ProgressTableCallback, *bar, AdviceCallback)
    )


class _Callbacks(tuple[type[TrainerCallback], ...]):
    """A tuple that shows the names of its classes, or one word when it is a default value in a signature."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "DEFAULT_CALLBACKS" if self is DEFAULT_CALLBACKS else str(self)

    def __str__(self) -> str:
        return f"({', '.join(callback.__name__ for callback in self)})"


DEFAULT_CALLBACKS = get_default_callbacks()

_MODULES = "pytorch_accel_lite.callbacks", "pytorch_accel_lite.base.events", "pytorch_accel_lite.base.watched_metric"
__all__ = [
    name
    for name, value in globals().items()
    if not name.startswith("_") and getattr(value, "__module__", "").startswith(_MODULES)
]
