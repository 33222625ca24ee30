"""``trainer.estimate_memory()``, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from accelerate.utils import convert_file_size_to_int

from pytorch_accel_lite.data import Batch, CollateFunction, LoaderKwargs, NamedData
from pytorch_accel_lite.extending import RunRequest, Snapshot, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int, check_range, is_overridden
from pytorch_accel_lite.extension_tools.data_and_batches import DEFAULT_BATCH_SIZE, infer_batch_size
from pytorch_accel_lite.extension_tools.modules_and_devices import capacity_of, is_quantised_by
from pytorch_accel_lite.extension_tools.texts_and_pages import Report
from pytorch_accel_lite.extensions.memory_estimate.fake_training import Scenario, measure_step
from pytorch_accel_lite.extensions.memory_estimate.live_bytes import KINDS
from pytorch_accel_lite.extensions.trials import Trial
from pytorch_accel_lite.utils import format_bytes

#: Share of a device's memory that is left for fragmentation, the buffers of libraries, and the driver.
_RESERVE = 0.1
_REMEDIES = "Smaller batches, more processes or sharded=True lower it: estimate again with them."


@dataclass(repr=False)
class MemoryEstimate(Report):
    """The result of ``Trainer.estimate_memory()``; its repr is a report.

    All sizes are in bytes, for one device.

    Args:
        peak: the peak memory of tensors
        parts: the parts of the peak by kind: ``"parameters"``, ``"buffers"``, ``"gradients"``, ``"optimizer"`` (its
            state), ``"averages"`` (of ``ModelEmaCallback``), ``"activations"`` (all that the forward pass keeps,
            including the batch and copies of weights in another precision), ``"communication"`` (gathered weights and
            buffers of communication) and ``"temporary"`` (other results of the backward pass and of the update)
        stage: when the peak occurs: ``"forward pass"``, ``"backward pass"`` or ``"update"``
        world_size: number of processes
        per_device_batch_size: number of samples in a batch of one process
        is_sharded: whether the model is sharded over the processes
        device_memory: the memory of a device; ``None`` if unknown
        remedy: what activation checkpointing would save, if the step does not fit
    """

    peak: int
    parts: dict[str, int]
    stage: str
    world_size: int
    per_device_batch_size: int
    is_sharded: bool
    device_memory: int | None = None
    remedy: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether the peak is at most 90 % of a device's memory. The rest is left for fragmentation and libraries."""
        return None if self.device_memory is None else self.peak <= (1 - _RESERVE) * self.device_memory

    def summary(self) -> str:
        """Return the peak and its conditions in a sentence."""
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        sharing = " that share the model" if self.is_sharded else ""
        return (
            f"At most {format_bytes(self.peak)} per device, in the {self.stage}: {processes}{sharing}, batches of "
            f"{self.per_device_batch_size} (an experimental estimate)."
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the name of each part of the peak, with its size and its share as text."""
        sizes = {kind: size for kind, size in self.parts.items() if size}
        return [(kind, f"{format_bytes(size)}, {100 * size / self.peak:3.0f} %") for kind, size in sizes.items()]

    def notes(self) -> list[str]:
        """Return whether it fits, and if not, what would lower the peak."""
        if self.device_memory is None:
            return []
        verdict = "This fits" if self.fits else "This does not fit"
        reserve = f"{100 * _RESERVE:.0f} % of which are left for fragments, libraries and the driver"
        note = f"{verdict} in {format_bytes(self.device_memory)}, {reserve}."
        return [note] if self.fits else [note, *filter(None, [self.remedy]), _REMEDIES]


def estimate_memory(
    self: TrainerLike,
    train_dataset: NamedData,
    per_device_batch_size: int = DEFAULT_BATCH_SIZE,
    world_size: int = 1,
    gradient_accumulation_steps: int | Mapping[int, int] = 1,
    gradient_clip_value: float | None = None,
    gradient_clip_norm: float | None = None,
    train_dataloader_kwargs: LoaderKwargs | None = None,
    collate_fn: CollateFunction | None = None,
    *,
    sharded: bool | None = None,
    device_type: str | None = None,
    device_memory: int | float | str | None = None,
) -> MemoryEstimate:
    """Estimate how much memory training takes on each device, for any number of processes, without these devices.

    Experimental. Two updates are made on copies of the model and the optimizer with fake tensors, which have shapes but
    no memory, so the model may be on the meta device and of any size. Nothing is changed. Call it in a single process.

    Args:
        world_size: number of processes
        sharded: whether to shard the model over the processes by ``fully_shard``, block by block. By default an
            overridden ``parallelize_model()`` shards it, or it is not sharded.
        device_type: the kind of device; by default the trainer's device, or ``"cuda"`` if that is a CPU
        device_memory: the memory of a device, in bytes or as ``"80GB"`` or ``"24GiB"``; by default the memory of the
            trainer's GPU, if it has one

    Returns:
        the estimate, to be printed in a script; consoles and notebooks show it

    Raises:
        NotImplementedError: if the step needs the values of tensors, as ``.item()`` does
    """
    check_positive_int("world_size", world_size)
    request = RunRequest(
        num_epochs=1,
        gradient_accumulation_steps=gradient_accumulation_steps,
        gradient_clip_value=gradient_clip_value,
        gradient_clip_norm=gradient_clip_norm,
    )
    if self.ranks.world_size > 1 or dist.is_initialized() or self.is_sharded:
        raise RuntimeError(
            "estimate_memory() needs a plain Accelerator, and neither a job of several processes nor a process group. "
            "Start the script as a single one: python script.py, without a launcher."
        )
    if any(is_quantised_by(parameter, "bitsandbytes") for parameter in self.get_model().parameters()):
        raise ValueError(
            f"estimate_memory() computes without values, and {type(self.get_model()).__name__} has weights of "
            "bitsandbytes, which cannot. Estimate the model in bfloat16, which takes more, or quantised by torchao."
        )
    size, kwargs = per_device_batch_size, train_dataloader_kwargs
    any_step = ("train_step", "closure")
    trial = Trial(self, "estimate_memory", train_dataset, size, request, kwargs, collate_fn, supports=any_step)
    kind = self.device.type.replace("cpu", "cuda") if device_type is None else _check_device_type(device_type)
    memory = capacity_of(self.device)
    if device_memory is not None:
        memory = _bytes_of(device_memory)
    windows = gradient_accumulation_steps
    # More than two steps of accumulation have the same peak as two.
    request.gradient_accumulation_steps = min(max(windows.values()) if isinstance(windows, Mapping) else windows, 2)
    how = _sharding(self, world_size, sharded)
    with Snapshot() as before:
        before.keep_generators()
        batch = trial.read_batch(int(size))
        size = infer_batch_size(batch.data, batch.num_samples)
        scenario = Scenario(world_size, how, kind)
        live = measure_step(trial, batch, scenario)
        parts = {kind: live.at_peak[kind] for kind in KINDS}
        found = MemoryEstimate(live.peak, parts, live.stage, world_size, size, how != "none", memory)
        if found.fits is False and self.activation_checkpointing is False:
            found.remedy = _try_checkpointing(trial, batch, scenario, live.peak)
    return found


def _check_device_type(device_type: str) -> str:
    try:
        return torch.device(device_type).type
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device_type={device_type!r} must be the kind of a device, such as 'cuda' or 'cpu'."
        ) from None


def _bytes_of(device_memory: int | float | str) -> int:
    """Return the memory of a device in bytes."""
    if isinstance(device_memory, float):
        return int(check_range("device_memory", device_memory, above=0))
    if not isinstance(device_memory, str):
        return check_positive_int("device_memory", device_memory)
    try:
        return check_positive_int("device_memory", convert_file_size_to_int(device_memory))
    except ValueError:
        raise ValueError(
            f"device_memory={device_memory!r} must be a number of bytes, or a number with a unit, such as '80GB'."
        ) from None


def _try_checkpointing(trial: Trial, batch: Batch, scenario: Scenario, peak: int) -> str:
    """Return what activation checkpointing saves and costs; an empty text for a model without repeated blocks."""
    checkpointing = scenario._replace(checkpoints=True)
    try:
        saved = peak - measure_step(trial, batch, checkpointing).peak
    except (KeyError, ValueError):
        return ""
    # The counter keeps tensors itself, so only steps that both have it can be compared.
    steps = [measure_step(trial, batch, each._replace(counts_flops=True)) for each in (scenario, checkpointing)]
    more = steps[1].flops / steps[0].flops - 1 if steps[0].flops else 0.0
    return (
        f"Trainer(activation_checkpointing=True) would save {format_bytes(saved)} for about "
        f"{100 * more:.0f} % more computation."
    )


def _sharding(trainer: TrainerLike, world_size: int, sharded: bool | None) -> Literal["custom", "blocks", "none"]:
    """Return how the model is sharded over the processes."""
    if is_overridden(trainer, "parallelize_model"):
        if sharded is False:
            owner = type(trainer).__name__
            raise ValueError(f"sharded=False, but {owner}.parallelize_model shards the model. Use another trainer.")
        return "custom"
    if sharded and world_size == 1:
        raise ValueError("sharded=True needs several processes to divide the model over: pass world_size=8, say.")
    return "blocks" if sharded else "none"
