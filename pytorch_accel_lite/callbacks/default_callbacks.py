"""The callbacks that a trainer has by default, for its metrics, and besides those passed to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pytorch_accel_lite.base.arguments import check_bool
from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.callbacks.move_modules import MoveModulesToDeviceCallback
from pytorch_accel_lite.callbacks.terminate_on_nan import TerminateOnNaNCallback
from pytorch_accel_lite.run.events import TrainerCallback

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

#: In the order in which they run. Extensions insert theirs.
DEFAULTS: list[type[TrainerCallback]] = [MoveModulesToDeviceCallback, TerminateOnNaNCallback]
#: Those of ``DEFAULTS`` that show the progress of a run, and may be left out.
PROGRESS_BARS: list[type[TrainerCallback]] = []
#: Functions that return the callbacks which each trainer has besides those passed, as an environment variable may ask.
ADDED_TO_EACH_TRAINER: list[Callable[[], Iterable[TrainerCallback]]] = []
#: Creates the callback that records the metrics of ``Trainer(metrics=...)`` in each evaluation.
METRICS: Slot[Callable[[str | Sequence[str] | Metric | MetricCollection | Mapping[str, Metric | str]], TrainerCallback]]
METRICS = Slot("metrics")


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """Return the callbacks that a trainer uses by default.

    Args:
        progress_bar: include ``ProgressBarCallback``
    """
    is_shown = check_bool("progress_bar", progress_bar)
    return CallbackClasses(callback for callback in DEFAULTS if is_shown or callback not in PROGRESS_BARS)


class CallbackClasses(tuple[type[TrainerCallback], ...]):
    """A tuple that shows the names of its classes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"({', '.join(callback.__name__ for callback in self)})"


class DefaultCallbacks(CallbackClasses):
    """The default value of the callbacks of a trainer, which is one word in a signature."""

    __slots__ = ()
    __str__ = CallbackClasses.__repr__

    def __repr__(self) -> str:
        return "DEFAULT_CALLBACKS"
