"""Checks of what the user asked for, before anything happens. Each error names the argument and its value."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from pytorch_accel_lite.run_config import RunRequest
from pytorch_accel_lite.utils import check_positive_int, check_positive_number


def check_training(optimizer: Any, accelerator: Accelerator, request: RunRequest, create_scheduler_fn: Any) -> None:
    """Check the arguments of a training run.

    :raises TypeError, ValueError: for the first that is wrong
    """
    if optimizer is None:
        raise ValueError("optimizer=None: train() needs a trainer that was given an optimizer.")
    if request.num_epochs is None and request.max_num_train_steps is None:
        raise ValueError("num_epochs=None and max_num_train_steps=None: train() needs one of them.")
    for name in ("num_epochs", "max_num_train_steps", "gradient_accumulation_steps"):
        if getattr(request, name) is not None:
            check_positive_int(name, getattr(request, name))
    for name in ("gradient_clip_value", "gradient_clip_norm"):
        if getattr(request, name) is not None:
            check_positive_number(name, getattr(request, name))
    if create_scheduler_fn is not None and not callable(create_scheduler_fn):
        raise TypeError(
            f"create_scheduler_fn={create_scheduler_fn!r} must be a function that makes a scheduler from an "
            "optimizer, not a scheduler: for example functools.partial(StepLR, step_size=10)."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"The accelerator has gradient_accumulation_steps={accelerator.gradient_accumulation_steps}. "
            "Leave it at 1 there, and pass gradient_accumulation_steps to train() instead."
        )


def check_dataset(name: str, dataset: Any, batch_size: int) -> None:
    """Check a dataset and the batch size it is to be read with.

    :raises TypeError, ValueError: when there is no dataset, it is empty, or the batch size is no positive integer
    """
    check_positive_int("per_device_batch_size", batch_size)
    if type(dataset) is dict:
        if not dataset:
            raise ValueError(f"{name}={{}}: a dict of datasets needs at least one.")
        for key, part in dataset.items():
            check_dataset(f"{name}[{key!r}]", part, batch_size)
        return
    if dataset is None:
        raise ValueError(f"{name}=None: pass a dataset.")
    try:
        size = len(dataset)
    except TypeError:
        return
    if size == 0:
        raise ValueError(f"{name} is empty: {type(dataset).__name__} has length 0.")
