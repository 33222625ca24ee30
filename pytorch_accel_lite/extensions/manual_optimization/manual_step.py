"""User-defined training steps, which decide when each optimizer is updated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extending import (
    MANUAL,
    MICROBATCHES,
    SHARDED,
    SKIPPED_BATCHES,
    BatchOutput,
    Conflict,
    GradientWindow,
    Run,
    Step,
    TrainerLike,
    backward,
)
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import check_items, complete_output, infer_batch_size
from pytorch_accel_lite.extension_tools.modules_and_devices import mixed_precision
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    Count,
    TrainerOptimizer,
    all_optimized_parameters,
    average_gradients,
    buffers_in,
    clip_keeping_norm,
    optimized_parameters,
    parts_of_optimizer,
    schedulers_in,
)
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.runs_and_steps import is_stepped_after_updates, replaced, step_after_update
from pytorch_accel_lite.extension_tools.states_and_files import buffers_beside_model
from pytorch_accel_lite.extension_tools.texts_and_pages import short_repr

_UPDATES = "the updates of a failed step cannot be undone"


class ManualStep(Step):
    """The user's ``train_step``, with an accumulation window for each optimizer.

    Args:
        trainer: the trainer
        run: the run whose batches the step trains on

    Attributes:
        optimizers: the optimizers, by name
        updating: name of the optimizer that is being updated, or was last
        updated: names of the optimizers that have been updated in the run
        windows: the accumulation window of each optimizer, by name
        losses: losses of the current step, by optimizer name
        items: number of items averaged in each loss, unless the items are samples
    """

    features = (
        MANUAL.with_conflicts(
            Conflict(MICROBATCHES, _UPDATES),
            Conflict(SKIPPED_BATCHES, _UPDATES),
            Conflict(SHARDED, "it averages gradients itself, for whole weights"),
        ),
    )
    updates_one_by_one = True

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        super().__init__()
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # without Accelerate's wrapper
        self.optimizers: dict[str, TrainerOptimizer] = parts_of_optimizer(trainer.optimizer) or {"loss": optimizer}
        self.updating = next(iter(self.optimizers))
        self.updated: set[str] = set()
        window = run.window
        batch_size = run.required_config.train_per_device_batch_size
        self.windows = {
            name: GradientWindow(run.ranks, run.device, window.steps, batch_size) for name in self.optimizers
        }
        self._num_parameters = max(len(optimized_parameters(part)) for part in self.optimizers.values())
        self.losses: dict[str, torch.Tensor] = {}
        self.items: dict[str, Count] = {}
        self._scaler = trainer.accelerator.scaler
        self._must_update_scaler = False
        self._updates_made: list[bool] = []  # for each update of the step, whether it was made or skipped
        self._synced_buffers: list[tuple[torch.nn.Module, str]] = []

    def begin_replicas(self, trainer: TrainerLike, run: Run) -> None:
        """Start with the same weights and buffers, and note the buffers that each update must equalise."""
        if run.ranks.world_size == 1:
            return
        shared = [*trainer.model.parameters(), *all_optimized_parameters(trainer), *trainer.model.buffers()]
        run.ranks.copy_from_first(list(dict.fromkeys(shared)))
        self._synced_buffers = [*buffers_beside_model(trainer), *buffers_in([trainer.model])]

    def begin(self, trainer: TrainerLike, run: Run) -> None:
        """Check that the schedulers, which ``update()`` steps one by one, are not stepped by a method of the user."""
        has_several = trainer.scheduler is not None and len(schedulers_in(trainer.scheduler)) > 1
        if "scheduler_step" in run.overridden and has_several and is_stepped_after_updates(trainer):
            raise ValueError(
                f"{type(trainer).__name__}.scheduler_step is overridden, but update() steps the scheduler of each "
                "optimizer by itself. Leave the method out, or step the schedulers in train_step and pass no "
                "create_scheduler_fn."
            )

    @property
    def optimizers_never_updated(self) -> list[str]:
        """The names of the optimizers that the run has never updated."""
        return [name for name in self.optimizers if name not in self.updated]

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the user's step on a batch and track its losses."""
        self.losses = {}
        self.items = {}
        self._updates_made = []
        with mixed_precision(trainer.accelerator):
            output = trainer.train_step(batch.data)
        output = self._complete(output)
        output = complete_output(output, batch.data, batch.num_samples, "train_step", training=False)
        run.loss_trackers.note_batch_size(batch, output["batch_size"])
        run.loss_trackers.num_items = self.items
        run.count_step(output, batch)
        run.window.has_gradients = True
        return output

    def optimizer_to_update(self, trainer: TrainerLike, run: Run) -> TrainerOptimizer:
        """Return the optimizer for which ``update()`` is being called."""
        return self.optimizers[self.updating]

    def set_accumulation(self, trainer: TrainerLike, run: Run, steps: int) -> None:
        """Set the number of steps for every optimizer."""
        super().set_accumulation(trainer, run, steps)
        for window in self.windows.values():
            window.steps = steps

    def _complete(self, output: object) -> BatchOutput:
        if output is not None and not isinstance(output, dict):
            raise TypeError(f"train_step must return a dict or None, not {type(output).__name__}.")
        completed: BatchOutput = {} if output is None else output
        if completed.get("loss") is None:
            if not self.losses:
                raise ValueError("train_step made no update: call self.update(loss, optimizer=...), or return a loss.")
            completed["loss"] = dict(self.losses)
        elif not self.losses and not self.updated and getattr(completed["loss"], "requires_grad", False):
            parameters = chain.from_iterable(map(optimized_parameters, self.optimizers.values()))
            if all(parameter.grad is None for parameter in parameters):  # train_step may call backward() itself
                warn_outside(
                    "train_step returned a loss that requires gradients, but called no update(), so nothing learns "
                    "from it, unless the step uses an optimizer by itself. Call self.update(loss), or override "
                    "calculate_train_batch_loss if each step makes one update."
                )
        counts = [self.items.get(name) for name in self.losses]
        if counts and counts[0] is not None and all(count is counts[0] for count in counts):
            completed.setdefault("num_items_in_batch", counts[0])
        return completed

    def update_optimizer(
        self,
        trainer: TrainerLike,
        run: Run,
        loss: torch.Tensor,
        optimizer: str | None,
        items: Count | None,
        retain_graph: bool,
    ) -> None:
        """Accumulate the gradients of an optimizer's parameters; at the end of a window, update them."""
        if optimizer is None and len(self.optimizers) > 1:
            raise ValueError(f"update() needs optimizer=, one of {', '.join(map(repr, self.optimizers))}.")
        name = next(iter(self.optimizers)) if optimizer is None else optimizer
        if name not in self.optimizers:
            has_names = bool(parts_of_optimizer(trainer.optimizer))
            existing = ", ".join(map(repr, self.optimizers)) if has_names else "one without a name"
            raise ValueError(f"update(optimizer={short_repr(optimizer)}): there is no such optimizer, only {existing}.")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise _loss_error(loss)
        loss = loss.reshape(())
        batch = run.batch
        assert batch is not None
        if name in self.losses and run.window.steps > 1:
            raise RuntimeError(
                f"update(optimizer={name!r}) was called twice in a step, with gradient_accumulation_steps="
                f"{run.window.steps}: it is ambiguous which of the two updates the gradients accumulate for. Add the "
                "losses, or train without accumulation."
            )
        if not self.windows[name].has_gradients:
            _refuse_gradients(name, self.optimizers[name])
        samples = infer_batch_size(batch.data) if batch.num_samples is None else batch.num_samples
        total = samples if batch.total_samples is None else batch.total_samples
        self.losses[name] = loss.detach()
        if items is not None:
            check_items(items, f"update(optimizer={name!r}): num_items")
            self.items[name] = items
        output: BatchOutput = {"loss": loss} if items is None else {"loss": loss, "num_items_in_batch": items}
        if trainer.callback_handler.listeners["on_backward_start"]:
            self.losses[name] = loss.detach().clone()  # a callback may change it in place
        compute_gradients = partial(self._compute_gradients, trainer, name, retain_graph)
        backward(trainer, batch, output, samples, total, self.windows[name], compute_gradients)
        if run.window.is_ending:
            self._update_weights(trainer, run, name)

    def _compute_gradients(self, trainer: TrainerLike, name: str, retain_graph: bool, loss: torch.Tensor) -> None:
        parameters = [p for p in optimized_parameters(self.optimizers[name]) if p.requires_grad]
        if not parameters:
            raise ValueError(f"update(optimizer={name!r}): all parameters of that optimizer are frozen.")
        with torch.autocast(loss.device.type, enabled=False) if trainer.accelerator.native_amp else nullcontext():
            scaled = loss if self._scaler is None else self._scaler.scale(loss)
            scaled.backward(inputs=parameters, retain_graph=retain_graph)
        if name not in self.updated:
            if all(parameter.grad is None for parameter in parameters):
                raise ValueError(
                    f"update(loss, optimizer={name!r}): the loss does not depend on any parameter of that optimizer. "
                    "Was it computed from a detached output, or is it the loss of another optimizer?"
                )
            self.updated.add(name)

    def _update_weights(self, trainer: TrainerLike, run: Run, name: str) -> None:
        self.updating = name
        optimizer = self.optimizers[name]
        if trainer.ranks.world_size > 1:
            update = run.progress.update, len(self._updates_made), [*self.optimizers].index(name)
            average_gradients(optimized_parameters(optimizer), trainer.ranks, update, self._num_parameters)
        self.windows[name].finish(optimizer)
        self.gradient_norm = None
        self.skips_update, self.can_skip_update = False, True
        stepped = optimizer
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
            stepped = _ScaledOptimizer(optimizer, self._scaler)
        with _only_optimizer(trainer, stepped):
            if run.request.gradient_clip_value is not None or "clip_gradients" in run.overridden:
                clip_keeping_norm(trainer, run)
            else:
                trainer.clip_gradients()
        trainer.call_event("on_optimizer_step_start")
        with _only_optimizer(trainer, stepped):
            if not self.skips_update:
                trainer.optimizer_step()
            self.can_skip_update = False
            trainer.optimizer_zero_grad()
        # The scale changes only at the end of a window: other optimizers accumulate gradients with the same scale.
        self._must_update_scaler = self._scaler is not None
        if self.windows[name].steps == 1:
            self._update_scaler()
        was_made = not self.skips_update and not getattr(stepped, "was_skipped", False)
        self._updates_made.append(was_made)
        scheduler = schedulers_in(trainer.scheduler).get(name)
        if scheduler is not None and was_made and is_stepped_after_updates(trainer):
            with _only_optimizer(trainer, stepped):
                scheduler.step()

    def _update_scaler(self) -> None:
        if self._must_update_scaler:
            self._scaler.update()
        self._must_update_scaler = False

    def apply_update(self, trainer: TrainerLike, run: Run) -> None:
        """Count the update of a step, and step a scheduler shared by all optimizers."""
        run.window.has_gradients = False
        for name, window in self.windows.items():
            if window.has_gradients:
                raise RuntimeError(
                    f"update(optimizer={name!r}) was called in an accumulation window, but not in its last step, which "
                    "would have used the gradients. Call it in every step of a window, or train without accumulation."
                )
        self._update_scaler()
        self.skips_update = not all(self._updates_made)  # one optimizer that is not updated is enough
        if self._synced_buffers:
            run.ranks.copy_from_first(getattr(part, name) for part, name in self._synced_buffers)
        run.progress.update += 1
        self.count_if_skipped(trainer, run)
        if trainer.scheduler is not None and "" in schedulers_in(trainer.scheduler):
            trainer.optimizer._opt_called = True  # else torch warns that the scheduler steps too early
            was_made = any(self._updates_made) or not self._updates_made  # it waits if all updates were skipped
            if was_made:
                step_after_update(trainer)
        trainer.call_event("on_optimizer_step_end")

    def state_dict(self) -> StateDict:
        """Also return the nominal sizes of the windows."""
        items = {name: window.items_per_batch for name, window in self.windows.items()}
        return {**super().state_dict(), "own_items_per_batch": items}

    def load_state_dict(self, state: StateDict) -> None:
        """Also restore the nominal sizes of the windows."""
        super().load_state_dict(state)
        for name, window in self.windows.items():
            window.items_per_batch = state.get("own_items_per_batch", {}).get(name)


def _loss_error(loss: object) -> ValueError:
    """Return the error about a loss that is not a scalar tensor with gradients."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        return ValueError(f"update(loss): the loss must be a scalar tensor that requires gradients, not {shape}.")
    return ValueError(
        "update(loss): the loss does not require gradients. Was it detached, or computed under torch.no_grad() or "
        "with frozen networks?"
    )


def _refuse_gradients(name: str, optimizer: TrainerOptimizer) -> None:
    """Raise an error if there are gradients before the first backward pass of an update, which would use them, too."""
    gradients = (p.grad for p in optimized_parameters(optimizer) if p.grad is not None)
    if any(bool(gradient.any()) for gradient in gradients):  # an overridden optimizer_zero_grad may leave zeros
        raise RuntimeError(
            f"update(optimizer={name!r}): its parameters already have gradients, which the update would use as well. "
            "Does train_step call backward() itself? Pass the sum of the losses to update() instead, or clear the "
            "gradients before it."
        )


class _ScaledOptimizer:
    """An optimizer stepped by a gradient scaler, which skips steps with infinite gradients.

    Args:
        optimizer: the optimizer
        scaler: the gradient scaler of the ``Accelerator``

    Attributes:
        was_skipped: whether the step was skipped
    """

    def __init__(self, optimizer: TrainerOptimizer, scaler: Any) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self.was_skipped = True

    def step(self, closure: object = None) -> None:
        """Step the optimizer if its gradients are finite."""
        hook = self._optimizer.register_step_post_hook(self._note)
        try:
            self._scaler.step(self._optimizer)
        finally:
            hook.remove()

    def _note(self, *_: object) -> None:
        self.was_skipped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@contextmanager
def _only_optimizer(trainer: TrainerLike, optimizer: TrainerOptimizer) -> Iterator[None]:
    """Make one optimizer the trainer's only optimizer for a block, so that overridden methods apply to it alone.

    The gradients of this optimizer are already unscaled, so Accelerate must not unscale those of all optimizers to clip
    them.
    """
    with replaced(trainer, optimizer=optimizer), replaced(trainer.accelerator, _optimizers=[]):
        yield
