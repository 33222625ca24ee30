"""``trainer.log()``: values that a step logs besides its losses."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.run.accumulation import Count
from pytorch_accel_lite.run.run import TrainerLike


def log(self: TrainerLike, name: str, value: torch.Tensor | float, weight: Count | None = None) -> None:
    """Log a value of this step, to be averaged over the samples of the epoch or evaluation on all processes.

    Call it in a step method, or in a callback's event of a step. The mean is recorded with the losses, as
    ``train_<name>_epoch``, ``eval_<name>_epoch`` or ``evaluation_<name>``. In training, the latest value is also in
    ``step_metrics``. A prediction records nothing. Nothing is read from the device before the end of the epoch.

    Args:
        name: name of the value
        value: a number, or a tensor, whose elements are averaged
        weight: number of items averaged in the value; by default the samples in this process's batch: the
            ``batch_size`` that the step returns

    Raises:
        RuntimeError: if called outside a step
        TypeError: if the value is not a real number, or the name not a string
        ValueError: if a loss of the step has this name
    """
    if self.compiled_forward is not None and torch.compiler.is_compiling():
        # While a step is compiled, only note the value: logging is not part of the graph.
        self.compiled_forward.logged.append(
            (name, value.detach() if isinstance(value, torch.Tensor) else value, weight)
        )
        return
    run = self.current_run
    trackers = run.loss_trackers
    if not self.is_running or run.batch is None or trackers.is_recorded:
        raise RuntimeError(
            f"log({name!r}) adds to the mean of an epoch, so it can only be called in a step or its events. Record a "
            "value of an entire epoch with trainer.run_history.update_metric(name, value)."
        )
    if not isinstance(name, str) or not name:
        raise TypeError(f"log(name={name!r}): the name must be a string that is not empty.")
    if name == "loss" or name in trackers.parts:
        raise ValueError(f"{name!r} is already a loss of the step. Log the value under another name.")
    if not _is_real(value):
        raise TypeError(f"log({name!r}, {value!r}): the value must be a real number, or a tensor of them.")
    if run.batch.is_filler or run.kind == "prediction":
        return
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = _mean(value)
    if weight is None:
        trackers.log_per_sample(run.batch, name, value)
    else:
        trackers.log(name, value, weight)
    if trackers is run.unrecorded_losses:  # in a training epoch, whatever the mode of the model
        run.step_metrics[name] = value


def _is_real(value: Tree) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_complex()
    if isinstance(value, np.ndarray) and value.size != 1:
        return False
    return hasattr(value, "__float__") and not np.iscomplexobj(value)


def _mean(value: torch.Tensor | NDArray[np.generic]) -> torch.Tensor | float:
    """Return the mean of a tensor, of booleans too, in a tensor of its own; or the only element of an array."""
    if isinstance(value, np.ndarray):
        return float(value.item())
    value = value.detach() if value.is_floating_point() else value.float()
    return value.mean() if value.ndim else value.clone()  # the step may change the tensor
