"""Checks of the arguments of the trainer and its methods, before anything else happens.

Each raises a ``TypeError`` or ``ValueError`` for the first invalid argument, with its name and value.
"""

from __future__ import annotations

import inspect
import numbers
import os
from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from pytorch_accel_lite.base.arguments.argument_checks import (
    check_choice,
    check_number,
    check_positive_int,
    check_positive_number,
    optional,
    refuse_class,
)
from pytorch_accel_lite.base.display.reprs import short_repr
from pytorch_accel_lite.base.modules.sharded_weights import tensor_parallel_size
from pytorch_accel_lite.base.names.unknown_names import did_you_mean
from pytorch_accel_lite.distributed.accelerator import current_process
from pytorch_accel_lite.optimizers.optimizer_types import TrainerOptimizer
from pytorch_accel_lite.run.intervals import parse_interval
from pytorch_accel_lite.run.metrics.history import RunHistory
from pytorch_accel_lite.run.request_and_config import RunRequest

_COMPILE = (bool, dict), "True, False, or a dict of arguments for torch.compile, such as {'mode': 'max-autotune'}"
#: The types of a trainer's arguments.
_TYPES: dict[str, tuple[Any, str]] = {
    "model": (nn.Module, "a torch.nn.Module"),
    "run_history": ((RunHistory, NoneType), "an instance of RunHistory, or None"),
    "accelerator": ((Accelerator, NoneType), "an accelerate.Accelerator, or None"),
    "compile_model": (_COMPILE[0], f"{_COMPILE[1]}, or 'blocks'"),
    "compile_step": _COMPILE,
}
_SEEDED = "Leave it out and pass Trainer(seed=...): the order of an epoch then follows from that seed and the epoch."
#: What to do instead of setting an option of the ``DataLoaderConfiguration`` that has no effect here.
_INSTEAD_OF_CONFIGURATION = {
    "use_seedable_sampler": _SEEDED,
    "data_seed": _SEEDED,
    "use_stateful_dataloader": "Leave it out: training states hold the position within an epoch. For a stream that "
    "workers read, pass torchdata's StatefulDataLoader.",
    "split_batches": "Leave it out and pass the batch size of one process.",
    "dispatch_batches": "Leave it out: each process reads its share of data that can be indexed or divided; the first "
    "process reads other streams for all.",
}
_SEEDS = 2**32 - 2**20  # leaves enough seeds for a million processes


# ------------------------------------------------------------------------------------------ of a trainer


def check_types(**arguments: object) -> None:
    """Check the types of the arguments of a trainer, which are passed by name."""
    for name, value in arguments.items():
        types, expected = _TYPES[name]
        refuse_class(name, value)
        if not isinstance(value, types):
            order = " The arguments are Trainer(model, loss_func, optimizer)." if name == "model" else ""
            raise TypeError(f"{name}={value!r} must be {expected}.{order}")
        if isinstance(value, dict) and name in ("compile_model", "compile_step"):
            _check_compile_options(name, value)


def _check_compile_options(name: str, options: dict[str, object]) -> None:
    """Check that ``torch.compile`` knows all arguments."""
    known = [*inspect.signature(torch.compile).parameters][1:]
    if name == "compile_model":
        known.append("blocks")
    for option in options:
        if option not in known:
            closest = did_you_mean(str(option), known)
            raise TypeError(f"{name} has the key {option!r}, which is not an argument of torch.compile.{closest}")


def check_constructor(loss_func: object, optimizer: object, seed: object) -> None:
    """Check the loss function, the optimizer and the seed of a trainer."""
    refuse_class("loss_func", loss_func)
    if loss_func is not None and not callable(loss_func):
        hint = "Pass a loss function, such as torch.nn.CrossEntropyLoss()."
        if hasattr(loss_func, "param_groups"):
            hint = "The optimizer comes after it: Trainer(model, loss_func, optimizer)."
        raise TypeError(f"loss_func={short_repr(loss_func)} must be callable, or None. {hint}")
    several = isinstance(optimizer, (Mapping, list, tuple))  # several are checked when they are combined
    is_one = hasattr(optimizer, "param_groups") or (callable(optimizer) and not isinstance(optimizer, nn.Module))
    if optimizer is not None and not several and not is_one:
        raise TypeError(
            f"optimizer={optimizer!r} must be an instance of torch.optim.Optimizer, several in a dict or a list, a "
            "function that makes them from the model's parameters, such as functools.partial(AdamW, lr=1e-3), or None."
        )
    if seed is not None:
        number = int(check_number("seed", seed, numbers.Integral, "an integer, or None"))
        if not 0 <= number < _SEEDS:
            raise ValueError(f"seed={seed!r} must be at least 0 and less than 2**32, as numpy's generator requires.")


def check_mixed_precision(precision: str | None, accelerator: Accelerator | None) -> None:
    """Check that an accelerator has the requested mixed precision, or, before there is one, that the device can.

    On CPUs, Accelerate would compute in fp16 without a gradient scaler. On other devices it raises its own errors.
    """
    if precision is None:
        return
    check_choice("mixed_precision", precision, ("no", "fp16", "bf16", "fp8"))
    if accelerator is None and precision == "fp16" and current_process().device.type == "cpu":
        raise ValueError("mixed_precision='fp16' needs a GPU or a similar device. Pass 'bf16', or 'no', on CPUs.")
    if accelerator is not None and accelerator.mixed_precision != precision:
        raise ValueError(
            f"mixed_precision={precision!r}, but that of the accelerator is {accelerator.mixed_precision!r}. Pass only "
            f"one of them to the trainer: mixed_precision, or Accelerator(mixed_precision={precision!r})."
        )


def check_parallelism(accelerator: Accelerator) -> None:
    """Check that the trainer supports the accelerator's ``parallelism_config``."""
    config = getattr(accelerator, "parallelism_config", None)
    shared = [f"{name}={getattr(config, name)}" for name in ("cp_size", "sp_size") if getattr(config, name, 1) > 1]
    if shared:
        raise ValueError(
            f"The accelerator's parallelism_config has {', '.join(shared)}: several processes would share the samples "
            "of a sequence. Context and sequence parallelism are not supported."
        )
    size = tensor_parallel_size(accelerator)
    if size > 1 and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            f"The accelerator's parallelism_config has tp_size={size} beside FSDP, which Accelerate cannot combine "
            "(accelerate issue 3729). Let the model come sharded: load it with transformers' "
            "distributed_config=DistributedConfig(tp_size=..., fsdp_size=...), or call parallelize_module and then "
            "fully_shard in parallelize_model(mesh); pass an Accelerator without an FSDP plugin."
        )


# ------------------------------------------------------------------------------------------- of a training run


def check_resume_from(resume_from: object) -> None:
    """Check that a state to resume from is named."""
    if resume_from is not None and not isinstance(resume_from, (str, os.PathLike)):
        raise TypeError(
            f"resume_from={resume_from!r} must be 'latest', for the newest state, the directory or URL of a state, or "
            "None for a new run."
        )


def check_training(optimizer: TrainerOptimizer, accelerator: Accelerator, request: RunRequest) -> None:
    """Check the arguments of a training run."""
    if optimizer is None:
        raise ValueError("optimizer=None: train() needs an optimizer. Pass one to the trainer.")
    refuse_class("optimizer", optimizer)  # the constructor takes a class, too, but not an assignment
    if request.num_epochs is None and request.max_num_train_steps is None:
        raise ValueError("num_epochs=None and max_num_train_steps=None: train() needs one of them.")
    _check_accelerator(accelerator)
    optional(check_positive_int, "num_epochs", request.num_epochs)
    optional(check_positive_int, "max_num_train_steps", request.max_num_train_steps)
    optional(check_positive_number, "gradient_clip_value", request.gradient_clip_value)
    optional(check_positive_number, "gradient_clip_norm", request.gradient_clip_norm)
    if isinstance(request.gradient_accumulation_steps, Mapping):
        _check_accumulation("gradient_accumulation_steps", request.gradient_accumulation_steps)
    else:
        check_positive_int("gradient_accumulation_steps", request.gradient_accumulation_steps)
    check_positive_int("eval_every_n_epochs", request.eval_every_n_epochs)
    if request.evaluate_every is not None:
        parse_interval("evaluate_every", request.evaluate_every)
        if request.eval_every_n_epochs != 1:
            raise ValueError(
                f"evaluate_every={request.evaluate_every!r} is instead of eval_every_n_epochs="
                f"{request.eval_every_n_epochs}: pass only one of them."
            )
    interval, metric = request.scheduler_interval, request.scheduler_metric
    check_choice("scheduler_interval", interval, ("update", "epoch"))
    if metric is not None and not isinstance(metric, str):
        raise TypeError(f"scheduler_metric={metric!r} must be the name of a metric, or None.")
    if metric is not None and interval != "epoch":
        raise ValueError(
            f"scheduler_metric={metric!r}: metrics are recorded in evaluations. Pass scheduler_interval='epoch' too."
        )


def _check_accumulation(name: str, steps: Mapping[int, int]) -> None:
    """Check numbers of batches in an update that change after numbers of updates."""
    for first, size in steps.items():
        check_number(f"a key of {name}", first, numbers.Integral, "a number of updates")
        check_positive_int(f"{name}[{first!r}]", size)
    if min(steps, default=-1) != 0:
        raise ValueError(
            f"{name}={dict(steps)!r} must begin with 0, such as {{0: 1, 1000: 2}}: one batch in an update, and two "
            "after 1000 updates."
        )


def _check_accelerator(accelerator: Accelerator) -> None:
    """Refuse settings of an accelerator that the trainer has arguments of its own for, or that have no effect."""
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"The accelerator has gradient_accumulation_steps={accelerator.gradient_accumulation_steps}. "
            "Leave it at 1 there and pass gradient_accumulation_steps to train() instead."
        )
    for name, instead in _INSTEAD_OF_CONFIGURATION.items():
        value = getattr(accelerator.dataloader_config, name)
        if value not in (None, False):
            raise ValueError(f"The accelerator's DataLoaderConfiguration has {name}={value}. {instead}")
