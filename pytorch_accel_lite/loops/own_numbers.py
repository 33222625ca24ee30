"""Numbers of their own that steps and callbacks log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytorch_accel_lite.batches import find_batch_size

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


def log(self: Trainer, name: str, value: torch.Tensor | float, weight: Any = None) -> None:
    """Log a value of this step, to be averaged over the samples of the epoch or evaluation on all processes.

    Call it in a step method, or in a callback's event of a step. The mean is recorded with the losses, as
    ``train_<name>_epoch``, ``eval_<name>_epoch`` or ``evaluation_<name>``. In training, the latest value is also in
    ``step_metrics``. Nothing is read from the device before the end of the epoch.

    :param name: name of the value
    :param value: a number, or a tensor, whose elements are averaged
    :param weight: number of items that the value is a mean over; by default the samples in this process's batch
    :raises RuntimeError: if called outside a step
    :raises ValueError: if a loss of the step has this name
    """
    run = self.current_run
    trackers = run.loss_trackers
    if not self.is_running or run.batch is None or trackers.is_recorded:
        raise RuntimeError(
            f"log({name!r}) adds to the mean of an epoch, so it can only be called in a step or its events. Record a "
            "value of an entire epoch with trainer.run_history.update_metric(name, value)."
        )
    if name == "loss" or name in trackers.parts:
        raise ValueError(f"{name!r} is already a loss of the step. Log the value under another name.")
    if run.batch.num_samples == 0:  # a filler batch
        return
    if weight is None:
        weight = run.batch.num_samples or find_batch_size(run.batch.data)
    if isinstance(value, torch.Tensor):
        value = value.detach().mean() if value.ndim else value.detach()
    trackers.log(name, value, weight)
    if trackers is run.unrecorded:  # those of a training epoch, whatever the mode of the model
        run.step_metrics[name] = value
        if self.logical is not None:
            self.logical.note(name, value)
