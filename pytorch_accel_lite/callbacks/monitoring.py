"""Monitors of a run: learning rates, gradients, memory.

Each callback records values per epoch in the run history. Values per update, if it has any, are in
``trainer.step_metrics`` for loggers. No step reads from the device, except with ``LossScaleCallback``.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch

from pytorch_accel_lite.base.devices import accumulation_dtype, to_float
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.user_code import is_overridden
from pytorch_accel_lite.loop.clipping import total_norm
from pytorch_accel_lite.optimizers.optimizer_parts import group_names, is_created, parts_of_optimizer
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.settings import RunRequest

_MIB = 2**20


class LearningRateMonitorCallback(TrainerCallback):
    """Record the learning rate of each parameter group at the last update of an epoch.

    The metric is named ``lr``; ``lr_0``, ``lr_1`` ... if there are several groups; ``lr_<name>`` if there are several
    optimizers. Groups of optimizers that choose their rate themselves, such as Adafactor, have no such metric.
    """

    affects_training = False

    def __init__(self) -> None:
        self._latest: dict[str, float | torch.Tensor] = {}

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        if request.kind == "training":
            is_known = is_created(trainer.optimizer)  # otherwise, the number of groups is not known yet
            request.metrics.record(self, _rate_names(trainer) if is_known else (), and_others=not is_known)

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        groups = zip(_rate_names(trainer), trainer.optimizer.param_groups, strict=True)
        self._latest = {name: group["lr"] for name, group in groups if group.get("lr") is not None}
        trainer.step_metrics.update(self._latest)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        for name, value in self._latest.items():
            trainer.run_history.update_metric(name, float(value))

    def state_dict(self) -> StateDict:
        """Return the learning rates of the latest update."""
        return {"latest": {name: float(value) for name, value in self._latest.items()}}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        self._latest = dict(state["latest"])


def _rate_names(trainer: TrainerLike) -> list[str]:
    return [_join("lr", name) for name in group_names(trainer.optimizer)]


def _join(metric: str, part: str) -> str:
    """Return the name of a metric for an optimizer or a parameter group, whose own name may be empty."""
    return f"{metric}_{part}" if part else metric


class GradientNormCallback(TrainerCallback):
    """Record the total norm of the gradients, before they are clipped by norm.

    Recorded per epoch: the mean over all updates as ``gradient_norm_mean``, the maximum as ``gradient_norm_max`` and,
    if the run clips by norm, the fraction of clipped updates as ``clipped_updates``. An overridden ``train_step``
    updates several optimizers one by one: each has its own ``gradient_norm_<name>_mean``, ``gradient_norm_<name>_max``
    and ``clipped_updates_<name>``. Optimizers that step together are clipped together, so they have one norm. Left out
    are updates whose gradients overflow under a gradient scaler (fp16), which skips them.
    """

    affects_training = False

    def __init__(self) -> None:
        #: The norms by name of the optimizer; "" for a single optimizer, or for several that step together.
        self._norms: dict[str, GradientNorms] = {}

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        if request.kind != "training":
            return
        is_known = is_created(trainer.optimizer) or not is_overridden(trainer, "train_step")
        names = (list(parts_of_optimizer(trainer.optimizer)) if is_overridden(trainer, "train_step") else []) or [""]
        recorded = [f"{_join('gradient_norm', name)}_{kind}" for name in names for kind in ("mean", "max")]
        if request.gradient_clip_norm is not None:
            recorded += [_join("clipped_updates", name) for name in names]
        request.metrics.record(self, recorded if is_known else (), and_others=not is_known)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._norms = {}

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        limit = trainer.run_config.gradient_clip_norm if trainer.run_config is not None else None
        name = trainer.run.stepper.updating if parts_of_optimizer(trainer.optimizer) else ""
        norms = self._norms.setdefault(name, GradientNorms())
        norm = norms.add(total_norm(trainer), limit, only_finite=trainer.accelerator.scaler is not None)
        trainer.step_metrics[_join("gradient_norm", name)] = norm

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        for name, norms in self._norms.items():
            metric, count = _join("gradient_norm", name), int(norms.count)
            trainer.run_history.update_metric(f"{metric}_mean", float(norms.sum) / count if count else math.nan)
            trainer.run_history.update_metric(f"{metric}_max", float(norms.max) if count else math.nan)
            if norms.clipped is not None:
                clipped = float(norms.clipped) / count if count else math.nan
                trainer.run_history.update_metric(_join("clipped_updates", name), clipped)

    def state_dict(self) -> StateDict:
        """Return the sums of the epoch so far, by optimizer."""
        return {name: vars(norms).copy() for name, norms in self._norms.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        by_name = state if all(isinstance(sums, dict) for sums in state.values()) else {"": state}  # of version 0.1
        self._norms = {name: GradientNorms(**sums) for name, sums in by_name.items()}


@dataclass(eq=False, repr=False)
class GradientNorms:
    """The gradient norms of an epoch: their number, sum and maximum.

    Args:
        sum: the sum of the norms
        max: the largest norm
        clipped: the number of norms above the limit; ``None`` without a limit
        count: the number of norms
    """

    sum: float | torch.Tensor = 0.0
    max: float | torch.Tensor = 0.0
    clipped: float | torch.Tensor | None = None
    count: int | torch.Tensor = 0

    def add(self, total: torch.Tensor, limit: float | None, only_finite: bool = False) -> float | torch.Tensor:
        """Add a norm, and return it: as a number, or on a GPU as an unread tensor.

        Args:
            limit: the norm to which gradients are clipped, if they are
            only_finite: leave out a norm that is infinite or NaN
        """
        norm: float | torch.Tensor = to_float(total.detach()) if total.is_cpu else total.detach()
        added, counted = _finite_only(norm) if only_finite else (norm, 1)
        if isinstance(added, torch.Tensor):
            largest = self.max.to(added.device) if isinstance(self.max, torch.Tensor) else self.max  # loaded on the CPU
            self.max = torch.clamp(added, min=largest)
            self.sum = added.to(accumulation_dtype(added.device)) + self.sum
        else:
            self.max = added if added > self.max or math.isnan(added) else self.max
            self.sum = added + self.sum
        self.count = counted + self.count
        if limit is not None:
            self.clipped = (added > limit) + (0.0 if self.clipped is None else self.clipped)
        return norm


def _finite_only(norm: float | torch.Tensor) -> tuple[float | torch.Tensor, int | torch.Tensor]:
    """Return a norm and 1, or zeros in place of both if it is not finite."""
    if isinstance(norm, torch.Tensor):
        is_finite = norm.isfinite()
        return torch.where(is_finite, norm, 0.0), is_finite
    return (norm, 1) if math.isfinite(norm) else (0.0, 0)


class LossScaleCallback(TrainerCallback):
    """Record the loss scale and the skipped updates of the gradient scaler (fp16); without a scaler, record nothing.

    Recorded per epoch: ``loss_scale`` at its end, and the number of ``skipped_updates``; per update, ``loss_scale``.
    The scale is read from the device after each update, for which a scaler waits anyway.
    """

    affects_training = False

    def __init__(self) -> None:
        self._skipped_before = 0  # updates of the run, before this epoch

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        if trainer.accelerator.scaler is not None and request.kind == "training":
            request.metrics.record(self, ("loss_scale", "skipped_updates"))

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._skipped_before = trainer.run.stepper.skipped_updates

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.accelerator.scaler is not None:
            trainer.step_metrics["loss_scale"] = trainer.accelerator.scaler.get_scale()

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        scaler = trainer.accelerator.scaler
        if scaler is not None:
            trainer.run_history.update_metric("loss_scale", scaler.get_scale())
            skipped = trainer.run.stepper.skipped_updates - self._skipped_before
            trainer.run_history.update_metric("skipped_updates", skipped)

    def state_dict(self) -> StateDict:
        """Return the number of skipped updates before the epoch."""
        return {"skipped_before": self._skipped_before}

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        # States of 0.2 have the count of the epoch so far, but none of the run, which therefore begins at 0.
        self._skipped_before = state["skipped_before"] if "skipped_before" in state else -state["skipped"]


class DeviceMemoryCallback(TrainerCallback):
    """Record the peak memory use of any process, in MiB.

    On a GPU: ``memory_allocated_mib`` and ``memory_reserved_mib``, the peaks of the epoch. Elsewhere:
    ``memory_resident_mib``, the peak resident size since the process started.
    """

    affects_training = False

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        request.metrics.record(self, [f"memory_{kind}_mib" for kind in ("allocated", "reserved", "resident")])

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        memory = getattr(torch, trainer.device.type, None)
        if memory is not None and hasattr(memory, "reset_peak_memory_stats"):
            memory.reset_peak_memory_stats(trainer.device)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        memory = getattr(torch, trainer.device.type, None)
        if memory is not None and hasattr(memory, "reset_peak_memory_stats"):
            used = {
                "memory_allocated_mib": memory.max_memory_allocated(trainer.device) / _MIB,
                "memory_reserved_mib": memory.max_memory_reserved(trainer.device) / _MIB,
            }
        else:
            import resource  # POSIX only

            kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
            used = {"memory_resident_mib": kibibytes / (1024 if sys.platform != "darwin" else _MIB)}
        for name, largest in zip(used, trainer.ranks.max(list(used.values())), strict=True):
            trainer.run_history.update_metric(name, largest)
