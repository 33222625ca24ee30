"""Gradients of an accumulation window: those of the mean loss over its samples, however they were batched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator

from pytorch_accel_lite.base.devices import accumulation_dtype
from pytorch_accel_lite.base.modules import are_sharded, local
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.run_settings import TrainerRunConfig
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.optimizers.operations import optimized_parameters


class Accumulation:
    """The number of batches per process in an update, which may change during a run.

    :param steps: the number, or a dict from the number of updates after which it holds to the number
    """

    def __init__(self, steps: int | Mapping[int, int]) -> None:
        self._sizes = sorted(steps.items()) if isinstance(steps, Mapping) else [(0, steps)]

    @property
    def changes(self) -> bool:
        """Whether the number changes."""
        return len(self._sizes) > 1

    @property
    def last_change(self) -> int:
        """The number of updates after which it no longer changes."""
        return self._sizes[-1][0]

    @property
    def largest(self) -> int:
        """The largest number."""
        return max(size for _, size in self._sizes)

    def after(self, updates: int) -> int:
        """Return the number of batches in the update that follows a number of updates."""
        return [size for first, size in self._sizes if first <= updates][-1]

    def updates_after(self, steps: int, updates: int = 0) -> int:
        """Return the number of updates after an epoch of ``steps`` batches that begins after ``updates`` updates."""
        while steps > 0:
            size = self.after(updates)
            change = min((first for first, _ in self._sizes if first > updates), default=math.inf)
            count = int(min(math.ceil(steps / size), change - updates))
            steps -= count * size
            updates += count
        return updates

    def updates_in(self, epochs: int, steps: int) -> int:
        """Return the number of updates in epochs of ``steps`` batches."""
        updates = 0
        for epoch in range(epochs):
            if updates >= self.last_change:
                return updates + (epochs - epoch) * (self.updates_after(steps, updates) - updates)
            updates = self.updates_after(steps, updates)
        return updates

    def epochs_for(self, updates: int, steps: int) -> int:
        """Return the number of epochs of ``steps`` batches in which a number of updates is made."""
        epochs = done = 0
        while done < updates:
            after = self.updates_after(steps, done)
            if done >= self.last_change:
                return epochs + math.ceil((updates - done) / (after - done))
            epochs, done = epochs + 1, after
        return epochs


NOTHING = nullcontext()
Count = int | float | torch.Tensor


class GradientWindow:
    """Weights the micro-batches of one update so that their gradients add up to those of the full window.

    Each loss is a mean over a number of items (samples, or ``num_items_in_batch``). It is scaled by its share of a
    *nominal* window, in which every micro-batch of every rank has the same size. Just before clipping, the gradients
    are multiplied by the ratio of nominal to true size, which is 1 except for ragged windows. This is exact for
    micro-batches of unequal size, a short last window and any number of ranks, whose gradients DDP averages. The share
    in a window of one micro-batch, whose samples have been counted, is that of the true size.

    :param device: the device of the gradients
    :param steps: number of micro-batches per rank in a full window; may change between windows
    :param batch_size: number of samples in a nominal micro-batch of one rank
    """

    def __init__(self, ranks: Ranks, device: torch.device, steps: int, batch_size: int) -> None:
        self._ranks = ranks
        self._device = device
        self.steps = steps
        #: Number of micro-batches in the window so far.
        self.filled = 0
        #: Whether the current micro-batch is the last of the window.
        self.is_ending = False
        self._batch_size = batch_size
        #: The nominal size, and the true size so far; ``None`` if nothing has been added since the last update.
        self.sizes: tuple[float, Count] | None = None
        #: Whether a step has begun that has not been counted yet.
        self.is_in_step = False
        #: Whether batches are split into parts, which must be weighted even with one process.
        self.is_split = False
        #: Whether a rank may fail within a step, so that ranks must not communicate there.
        self.is_guarded = False
        #: Number of items in a nominal micro-batch, fixed by the first batch that returns ``num_items_in_batch``.
        self.items_per_batch: float | None = None
        #: The parameters that were clipped last, by their ids and in the order of the model.
        self.clipped_ids: list[int] = []
        self.clipped: list[torch.nn.Parameter] = []

    @property
    def is_between_updates(self) -> bool:
        """Whether the gradients of all steps have been used and counted, so that a run could resume from here."""
        return self.sizes is None and not self.is_in_step

    def scale(self, loss: torch.Tensor, num_samples: int, total_samples: int, items: Count | None) -> torch.Tensor:
        """Return the loss weighted by its share of the window.

        :param num_samples: number of samples in this rank's micro-batch; 0 for a filler batch
        :param total_samples: number of samples in this micro-batch over all ranks
        :param items: number of items that the loss is a mean over, if these are not samples
        """
        if self.steps == 1 and self._ranks.world_size == 1 and not self.is_split:
            self.sizes = 1, 1
            return loss
        local: Count = num_samples
        added: Count = total_samples
        nominal: float = self._batch_size
        if items is not None:
            local = added = as_weight(items) if num_samples else 0
            if self.items_per_batch is None and self.is_guarded:
                self.items_per_batch = nominal  # arbitrary, but the same on all ranks
            elif self.items_per_batch is None:  # once per run: the only read from the device
                self.items_per_batch = max(self._ranks.sum([float(local)])[0] / self._ranks.world_size, 1.0)
            nominal = self.items_per_batch
        elif self.steps == 1 and total_samples and not (self.is_split or self.is_guarded):
            self.sizes = total_samples, total_samples
            share = num_samples * self._ranks.world_size / total_samples
            return loss if share == 1 else loss * share
        true = added if self.sizes is None else self.sizes[1] + added
        self.sizes = nominal * self.steps * self._ranks.world_size, true
        return loss * (local / (nominal * self.steps))

    def finish(self, optimizer: Any) -> Count:
        """Correct the gradients if the window's true size differs from the nominal one, and start a new window.

        :return: the factor by which the gradients were multiplied
        """
        nominal, true = self.sizes or (1, 1)
        self.sizes = None
        if self.items_per_batch is not None:
            true = self._total_items(true)
        if isinstance(true, torch.Tensor):
            true = torch.where(true == 0, nominal, true)  # a window without any items has gradients of 0
        elif true in (0, nominal):
            return 1
        gradients = [local(p.grad) for p in optimized_parameters(optimizer) if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, nominal / true)
        return nominal / true

    def _total_items(self, local: Count) -> Count:
        """Return the number of items in the window over all ranks."""
        if self._ranks.world_size == 1:
            return local
        zero = torch.zeros((), dtype=accumulation_dtype(self._device), device=self._device)
        return self._ranks.sum_on_device(zero + as_weight(local))  # copying a number to a device would wait for it


def gradient_sync(accelerator: Accelerator, model: torch.nn.Module, ends_window: bool) -> AbstractContextManager[Any]:
    """Return a context in which gradients are averaged over the ranks only at the end of a window."""
    accelerator.sync_gradients = ends_window
    if ends_window or accelerator.num_processes == 1:
        return NOTHING
    return accelerator.no_sync(model)  # type: ignore[no-any-return]


def parameters_not_in_model(model: torch.nn.Module, optimizer: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer that are not in the model, such as those of the loss function."""
    in_model = set(model.parameters())
    return [parameter for parameter in optimized_parameters(optimizer) if parameter not in in_model]


def updated_parameters(trainer: TrainerLike) -> list[torch.nn.Parameter]:
    """Return the parameters that an update changes: the optimizer's, and the model's if it optimizes copies of them."""
    optimized = list(optimized_parameters(trainer.optimizer))
    ids = set(map(id, optimized))
    has_model = any(id(parameter) in ids for parameter in trainer.model.parameters())
    if has_model or trainer.current_run.step.updates_one_by_one:  # it may be for another module
        return optimized
    return [*trainer.model.parameters(), *optimized]


def clip(trainer: TrainerLike, config: TrainerRunConfig) -> None:
    """Clip each element of the gradients and their total norm, as configured."""
    accelerator, run = trainer.accelerator, trainer.current_run
    value, norm = config.gradient_clip_value, config.gradient_clip_norm
    if trainer.is_sharded:
        clipped = list(trainer.model.parameters())
    else:
        clipped = updated_parameters(trainer)
        ids = list(map(id, clipped))
        if run.window.clipped_ids != ids:
            run.window.clipped_ids, run.window.clipped = ids, _in_model_order(clipped, trainer.model)
        clipped = run.window.clipped
    if are_sharded(clipped):
        run.step.gradient_norm = clip_shards(accelerator, clipped, value, norm)
        return
    if value is not None:
        accelerator.clip_grad_value_(clipped, value)
    if norm is not None:
        is_plain = trainer.prepared_model is not None and trainer.prepared_model.is_plain
        run.step.gradient_norm = (_clip_norm if is_plain else accelerator.clip_grad_norm_)(clipped, norm)


def _in_model_order(parameters: list[torch.nn.Parameter], model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Sort parameters in the order of the model, on which the last bits of their norm depend; others come last."""
    positions = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    return sorted(parameters, key=lambda parameter: positions.get(id(parameter), len(positions)))


def _clip_norm(parameters: list[torch.nn.Parameter], limit: float) -> torch.Tensor:
    """Clip like ``torch.nn.utils.clip_grad_norm_``, with the same operations, but without sorting gradients twice.

    Sorting, and moving each norm to the device on which it already is, take torch longer than clipping a small model.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    device, dtype = (gradients[0].device, gradients[0].dtype) if gradients else (None, None)
    uniform = [g for g in gradients if type(g) is torch.Tensor and g.dtype is dtype and g.device == device]
    if device is None or device.type not in ("cpu", "cuda") or len(uniform) < len(gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    with torch.no_grad():
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
        torch._foreach_mul_(gradients, torch.clamp(limit / (total + 1e-6), max=1.0))
    return total


def total_norm(trainer: TrainerLike) -> torch.Tensor:
    """Return the total norm of the gradients of an update, before clipping by norm; computed once per update."""
    run = trainer.current_run
    if run.step.gradient_norm is None:
        updates_all = not run.step.updates_one_by_one  # otherwise those of the one being updated are unscaled already
        has_scaler = trainer.accelerator.scaler is not None
        if updates_all and has_scaler and run.required_config.gradient_clip_value is None:
            trainer.accelerator.unscale_gradients(trainer.optimizer)
        optimized = list(optimized_parameters(run.step.optimizer_to_update(trainer)))
        gradients = [parameter.grad for parameter in optimized if parameter.grad is not None]
        if are_sharded(optimized):
            run.step.gradient_norm = total_norm_of_shards(gradients)
        else:
            run.step.gradient_norm = torch.nn.utils.get_total_norm(gradients)
    norm: torch.Tensor = run.step.gradient_norm
    return norm


def as_weight(count: Count) -> Count:
    """Return a count as float64, if the device supports it: dividing integers would give float32."""
    return count.to(accumulation_dtype(count.device)) if isinstance(count, torch.Tensor) else count


def total_norm_of_shards(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the total norm of gradients, the same on all processes, as a plain tensor.

    torch computes norms only of gradients of the same mesh, so those of each mesh are combined.
    """
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms: list[Any] = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    full = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    return full[0] if len(full) == 1 else torch.nn.utils.get_total_norm(full)


def clip_shards(
    accelerator: Accelerator, parameters: Iterable[torch.nn.Parameter], value: float | None, norm: float | None
) -> torch.Tensor | None:
    """Clip gradients as ``clip_grad_value_`` and ``clip_grad_norm_`` do; return the norm before clipping it."""
    # Accelerate compares the parameters with those of every model it prepared, which fails if there are several.
    accelerator.unscale_gradients()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local(gradient) for gradient in gradients]
    if value is not None:
        torch._foreach_clamp_min_(shards, -value)
        torch._foreach_clamp_max_(shards, value)
    if norm is None:
        return None
    total = total_norm_of_shards(gradients)
    torch._foreach_mul_(shards, torch.clamp(norm / (total + 1e-6), max=1.0))
    return total
