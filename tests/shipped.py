"""The callbacks that are shipped, and how each is made: for the contract that all of them keep."""

from __future__ import annotations

import inspect
from functools import partial
from importlib.util import find_spec
from typing import Any

from torchmetrics import MeanSquaredError

import pytorch_accel_lite.callbacks as shipped
from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.schedulers import WSDLrScheduler
from tests.tasks import Broken

SHIPPED = [
    value
    for value in (getattr(shipped, name) for name in shipped.__all__)
    if isinstance(value, type) and issubclass(value, TrainerCallback) and value is not TrainerCallback
    if value.__name__ != "ModelSummaryCallback" or find_spec("torchinfo")  # of an extra
]


def text_of(model: Any) -> str:
    return f"of {type(model).__name__}"


# Arguments of the shipped callbacks that cannot be made without.
NEEDED: dict[str, dict[str, Any]] = {
    "LimitBatchesCallback": {"num_batches": 2},
    "LimitEvalStepsCallback": {"num_eval_steps": 2},
    "MetricsCallback": {"metrics": MeanSquaredError()},
    "ShowOutputsCallback": {"function": text_of},
    "StepBasedEvaluationCallback": {"eval_every_n_steps": 2},
    "TimeLimitCallback": {"limit": 3600},
}


# Arguments of train() that runs with a shipped callback need.
RUN: dict[str, dict[str, Any]] = {
    "WSDCheckpointCallback": {"create_scheduler_fn": partial(WSDLrScheduler, total_steps=6, decay_phase_ratio=0.5)}
}

# Arguments with which a run leaves a trace in the callback's state, where the defaults leave none.
STATEFUL: dict[str, dict[str, Any]] = {"MetricsCallback": {"metrics": MeanSquaredError(), "train": True}}
STATEFUL["ShowOutputsCallback"] = NEEDED["ShowOutputsCallback"]
STATEFUL["MetricsFileCallback"] = {"every_n_updates": 1}


# Arguments of train() with which a run leaves a trace in the callback's state, where a quiet run leaves none.
EVENTFUL: dict[str, dict[str, Any]] = {
    "SkipFailedBatchesCallback": {"train_dataset": Broken(), "train_dataloader_kwargs": {"num_workers": 0}}
}


# Has a state only so that those of earlier versions can be loaded.
STATELESS = {"SaveTrainingStateCallback"}

# Leaves a trace only with a gradient scaler: see test_monitoring.py.
NEEDS_A_SCALER = {"LossScaleCallback"}

# What these record differs from run to run.
NOT_REPEATABLE = {"DeviceMemoryCallback", "ThroughputCallback", "TimingCallback"}


def build(callback_class: type[TrainerCallback]) -> TrainerCallback:
    """Make a callback with its defaults, and with NEEDED where it has none."""
    required = [
        name
        for name, parameter in inspect.signature(callback_class).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return callback_class(**NEEDED[callback_class.__name__]) if required else callback_class()
