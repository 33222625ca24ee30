"""Monitors of a run: learning rates, gradients, throughput, loss scale, memory, and a summary of the model.

Each records values per epoch in the run history, and values per update, if it has any, in ``trainer.step_metrics`` for
loggers. No step reads from the device.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from pytorch_accel_lite.devices import accumulation_dtype, module_of, to_float
from pytorch_accel_lite.events import TrainerCallback
from pytorch_accel_lite.gradients import total_norm
from pytorch_accel_lite.optimizers import group_names, is_made
from pytorch_accel_lite.utils import check_positive_int

if TYPE_CHECKING:
    from pytorch_accel_lite.run_config import RunRequest
    from pytorch_accel_lite.trainer import Trainer

_MIB = 2**20


class LearningRateMonitorCallback(TrainerCallback):
    """Record the learning rate of each parameter group at the last update of an epoch.

    The metric is named ``lr``; ``lr_0``, ``lr_1`` ... if there are several groups; ``lr_<name>`` if there are several
    optimizers.
    """

    def __init__(self) -> None:
        self._latest: dict[str, Any] = {}
        self._names: list[str] | None = None

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        if request.kind == "training":
            knows = is_made(trainer.optimizer)  # else how many groups there will be is not known
            request.metrics.record(self, _rate_names(trainer) if knows else (), and_others=not knows)

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        groups = trainer.optimizer.param_groups
        if self._names is None or len(self._names) != len(groups):
            self._names = _rate_names(trainer)
        self._latest = {name: group["lr"] for name, group in zip(self._names, groups, strict=True)}
        trainer.step_metrics.update(self._latest)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        for name, value in self._latest.items():
            trainer.run_history.update_metric(name, float(value))

    def state_dict(self) -> dict[str, Any]:
        """Return the learning rates of the latest update."""
        return {"latest": {name: float(value) for name, value in self._latest.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`."""
        self._latest = dict(state["latest"])


def _rate_names(trainer: Trainer) -> list[str]:
    return ["_".join(filter(None, ("lr", name))) for name in group_names(trainer.optimizer)]


class GradientNormCallback(TrainerCallback):
    """Record the total norm of the gradients, before they are clipped by norm.

    Recorded per epoch: the mean over all updates as ``gradient_norm_mean``, the maximum as ``gradient_norm_max`` and,
    if the run clips by norm, the fraction of clipped updates as ``clipped_updates``. In an overridden ``train_step``,
    these are over the updates of all optimizers.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._sum: Any = 0.0
        self._max: Any = 0.0
        self._clipped: Any = 0.0
        self._count = 0

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        clipped = ["clipped_updates"] if request.gradient_clip_norm is not None else []
        request.metrics.record(self, ["gradient_norm_mean", "gradient_norm_max", *clipped])

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self._clear()

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        norm: Any = total_norm(trainer).detach()
        if norm.is_cpu:
            norm = to_float(norm)
            self._max = norm if norm > self._max or math.isnan(norm) else self._max
        else:
            self._max = torch.clamp(norm, min=self._max) if self._count else norm
        trainer.step_metrics["gradient_norm"] = norm
        self._sum = (norm.to(accumulation_dtype(norm.device)) if isinstance(norm, torch.Tensor) else norm) + self._sum
        self._count += 1
        limit = trainer.run_config.gradient_clip_norm if trainer.run_config is not None else None
        if limit is not None:
            self._clipped = (norm > limit) + self._clipped

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if not self._count:
            return
        trainer.run_history.update_metric("gradient_norm_mean", float(self._sum) / self._count)
        trainer.run_history.update_metric("gradient_norm_max", float(self._max))
        if trainer.run_config is not None and trainer.run_config.gradient_clip_norm is not None:
            trainer.run_history.update_metric("clipped_updates", float(self._clipped) / self._count)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the epoch so far."""
        return {"sum": self._sum, "max": self._max, "clipped": self._clipped, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`."""
        self._sum, self._max, self._clipped, self._count = (state[key] for key in ("sum", "max", "clipped", "count"))


class ThroughputCallback(TrainerCallback):
    """Record the training throughput over all processes, in samples per second and, if steps count them, tokens.

    Recorded per epoch, excluding evaluation: ``samples_per_second_epoch``, and ``items_per_second_epoch`` if steps
    return ``num_items_in_batch``. ``trainer.step_metrics`` has ``samples_per_second`` over the latest updates.

    :param window: number of updates over which the latest rate is measured
    """

    def __init__(self, window: int = 20) -> None:
        self.window = check_positive_int("window", window)
        self._restart(0)

    def _restart(self, samples: int) -> None:
        self._recent: deque[tuple[float, int]] = deque(maxlen=self.window)
        self._items: Any = None
        self._first = samples
        self._start = time.perf_counter()

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        request.metrics.record(self, {"samples_per_second_epoch": True, "items_per_second_epoch": True})

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        # The part of the epoch that was trained before resuming takes no time now.
        self._restart(trainer.progress.samples_in_epoch)

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        items = batch_output.get("num_items_in_batch")
        if items is not None:
            items = items.detach() if isinstance(items, torch.Tensor) else items
            self._items = items if self._items is None else self._items + items

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        now = time.perf_counter()
        samples = trainer.progress.samples_in_epoch
        since, before = self._recent[0] if self._recent else (self._start, self._first)
        self._recent.append((now, samples))
        trainer.step_metrics["samples_per_second"] = (samples - before) / (now - since)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        mine = time.perf_counter() - self._start, None if self._items is None else float(self._items)
        everyone = trainer.all_gather_object(mine)
        seconds = max(taken for taken, _ in everyone)
        rate = (trainer.progress.samples_in_epoch - self._first) / seconds
        trainer.run_history.update_metric("samples_per_second_epoch", rate)
        items = [count for _, count in everyone if count is not None]
        if items:
            trainer.run_history.update_metric("items_per_second_epoch", sum(items) / seconds)


class LossScaleCallback(TrainerCallback):
    """Record the loss scale and the skipped updates of the gradient scaler (fp16); without a scaler, record nothing.

    Recorded per epoch: ``loss_scale`` at its end, and the number of ``skipped_updates``.
    """

    def __init__(self) -> None:
        self._skipped = 0

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        request.metrics.record(self, {"loss_scale": None, "skipped_updates": False})

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self._skipped = 0

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self._skipped += trainer.update_was_skipped

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        scaler = trainer.accelerator.scaler
        if scaler is not None:
            trainer.run_history.update_metric("loss_scale", scaler.get_scale())
            trainer.run_history.update_metric("skipped_updates", self._skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the count of the epoch so far."""
        return {"skipped": self._skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`."""
        self._skipped = state["skipped"]


class DeviceMemoryCallback(TrainerCallback):
    """Record the peak memory use of any process, in MiB.

    On a GPU: ``memory_allocated_mib`` and ``memory_reserved_mib``, the peaks of the epoch. Elsewhere:
    ``memory_resident_mib``, the peak resident size since the process started.
    """

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        request.metrics.record(self, [f"memory_{kind}_mib" for kind in ("allocated", "reserved", "resident")])

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        memory = module_of(trainer.device)
        if hasattr(memory, "reset_peak_memory_stats"):
            memory.reset_peak_memory_stats(trainer.device)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        memory = module_of(trainer.device)
        if hasattr(memory, "reset_peak_memory_stats"):
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


class ModelSummaryCallback(TrainerCallback):
    """Print a summary of the model at the start of a run: its layers, their parameters and their sizes.

    :param depth: number of levels of nested modules to list
    """

    def __init__(self, depth: int = 1) -> None:
        self.depth = check_positive_int("depth", depth)

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.print(summarise(trainer.get_model(keep_torch_compile=False), self.depth))


def summarise(model: nn.Module, depth: int = 1) -> str:
    """Return a table of a model's layers with their numbers of parameters and trainable parameters, and their sizes.

    Tied parameters count once, in the first layer that has them. Sharded weights count in full.

    :param depth: number of levels of nested modules to list
    """
    rows = [("layer", "class", "parameters", "trainable", "MiB")]
    counted: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        level = name.count(".") + 1 if name else 0
        is_leaf = level == depth or not any(True for _ in module.children())
        if level > depth or (not is_leaf and not list(module.parameters(recurse=False))):
            continue
        own = list(module.parameters(recurse=level == depth))
        rows.append((name or "(itself)", type(module).__name__, *_count([p for p in own if p not in counted])))
        counted.update(own)
    everything = _count(list(model.parameters()))
    rows.append(("total", type(model).__name__, *everything))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _count(parameters: list[nn.Parameter]) -> tuple[str, str, str]:
    known = [p for p in parameters if not isinstance(p, UninitializedParameter)]
    unknown = "" if len(known) == len(parameters) else " + ?"  # lazy modules, known after the first batch
    trained = sum(p.numel() for p in known if p.requires_grad)
    size = sum(p.numel() * p.element_size() for p in known) / _MIB
    return f"{sum(p.numel() for p in known):,}{unknown}", f"{trained:,}{unknown}", f"{size:.2f}{unknown}"
