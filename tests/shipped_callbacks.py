"""The shipped callbacks and the arguments to create each, for the contract tests."""

from __future__ import annotations

import inspect
from functools import partial
from importlib.util import find_spec
from typing import Any

from torchmetrics import MeanSquaredError

import pytorch_accel_lite.callbacks as shipped
from pytorch_accel_lite import TrainerCallback, schedulers
from tests.small_models import Broken

SHIPPED = [
    value
    for value in (getattr(shipped, name) for name in shipped.__all__)
    if isinstance(value, type) and issubclass(value, TrainerCallback) and value is not TrainerCallback
    if value.__name__ != "ModelSummaryCallback" or find_spec("torchinfo")  # of an extra
]


def text_of(model: Any) -> str:
    return f"of {type(model).__name__}"


# Required arguments of shipped callbacks.
NEEDED: dict[str, dict[str, Any]] = {
    "LimitBatchesCallback": {"num_batches": 2},
    "LimitEvalStepsCallback": {"num_eval_steps": 2},
    "MetricsCallback": {"metrics": MeanSquaredError()},
    "ShowOutputsCallback": {"function": text_of},
    "StepBasedEvaluationCallback": {"eval_every_n_steps": 2},
    "TimeLimitCallback": {"limit": 3600},
}


# Arguments of train() that a shipped callback requires.
RUN: dict[str, dict[str, Any]] = {}
if "WSDCheckpointCallback" in shipped.__all__:  # otherwise its extension has been deleted
    plan = partial(schedulers.WSDLrScheduler, total_steps=6, decay_phase_ratio=0.5)
    RUN["WSDCheckpointCallback"] = {"create_scheduler_fn": plan}

# Arguments with which a run changes the callback's state, where the defaults do not.
STATEFUL: dict[str, dict[str, Any]] = {"MetricsCallback": {"metrics": MeanSquaredError(), "train": True}}
STATEFUL["ShowOutputsCallback"] = NEEDED["ShowOutputsCallback"]
STATEFUL["MetricsFileCallback"] = {"every_n_updates": 1}


# Arguments of train() with which a run changes the callback's state, where an ordinary run does not.
EVENTFUL: dict[str, dict[str, Any]] = {
    "SkipFailedBatchesCallback": {"train_dataset": Broken(), "train_dataloader_kwargs": {"num_workers": 0}}
}


# Has a state only to load states of earlier versions.
STATELESS = {"SaveTrainingStateCallback"}

# Change their states only with a gradient scaler, or with counters of energy: see the tests of their extensions.
NEEDS_A_DEVICE = {"LossScaleCallback", "EnergyCallback"}

# Their recorded values differ from run to run.
NOT_REPEATABLE = {"DeviceMemoryCallback", "ThroughputCallback", "TimingCallback"}


def build(callback_class: type[TrainerCallback]) -> TrainerCallback:
    """Create a callback with its defaults and its required arguments, from NEEDED."""
    required = [
        name
        for name, parameter in inspect.signature(callback_class).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return callback_class(**NEEDED[callback_class.__name__]) if required else callback_class()
