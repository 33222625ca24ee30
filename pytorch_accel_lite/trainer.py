"""The trainer: its public methods, the steps that can be overridden, and the loop, in reading order."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pytorch_accel_lite.base import TrainerBase
from pytorch_accel_lite.batches import batch_size_of, check_batch_size, check_loss, concatenate, to_cpu, total_loss
from pytorch_accel_lite.callbacks import DEFAULT_CALLBACKS, CallbackHandler, RunInterruptedError, StopTrainingError
from pytorch_accel_lite.checkpoint.training_state import TrainingState
from pytorch_accel_lite.data import LoadedBatch, NamedDatasets, ShardedLoader
from pytorch_accel_lite.data.defaults import default_loader_kwargs, merge_loader_kwargs
from pytorch_accel_lite.diagnosis import Diagnosis, diagnose
from pytorch_accel_lite.finding import LearningRates, check_range_test, largest_batch, range_test
from pytorch_accel_lite.gradients import (
    GradientWindow,
    average_gradients,
    clear_gradients,
    optimized_parameters,
    parameters_outside,
    updated_parameters,
)
from pytorch_accel_lite.guarding import StepGuard
from pytorch_accel_lite.placeholders import (
    PlaceholderError,
    TrainerPlaceholderValues,
    replace_trainer_placeholder_values,
)
from pytorch_accel_lite.preparation import evaluation_mode
from pytorch_accel_lite.resuming import (
    find_state,
    generator_states,
    restore,
    restore_callbacks,
    restore_own,
    set_generator_states,
)
from pytorch_accel_lite.run_config import RunRequest
from pytorch_accel_lite.signals import ending_in_order, exit_for
from pytorch_accel_lite.tracking import LossTracker, Progress
from pytorch_accel_lite.trials import unchanged
from pytorch_accel_lite.utils import check_positive_int, check_range
from pytorch_accel_lite.validation import (
    check_data,
    check_scheduler,
    check_training,
    has_no_batch,
    takes,
    warn_of_a_foreign_optimizer,
)

__all__ = [
    "DEFAULT_CALLBACKS",
    "PlaceholderError",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "replace_trainer_placeholder_values",
]

BatchOutput = dict[str, Any]
# What evaluate() and predict() set up, and put back when they are called within a training run.
_OF_A_RUN = (
    "run_config", "eval_dataset", "collate_fn", "_train_dataloader", "_train_dl_kwargs", "_eval_dataloader",
    "_eval_loaders", "_eval_dl_kwargs", "loss_trackers", "_update_limit",
)  # fmt: skip
# What run_evaluation() replaces for a while.
_OF_AN_EPOCH = (
    "loss_trackers", "recorded_losses", "model", "_trained_model", "_eval_dataloader", "callback_handler", "_loaded",
)  # fmt: skip

StrPath = str | os.PathLike[str]
_NOTHING = nullcontext()


class Trainer(TrainerBase):
    """Trains, evaluates and applies a model on whatever hardware there is.

    Behaviour is changed by overriding a step method, or by callbacks; the loop with all its events is in the
    docstring of :class:`~pytorch_accel_lite.TrainerCallback`.

    :param model: the model to train
    :param loss_func: called as ``loss_func(model_outputs, targets)``, returns a scalar that is a mean over the
        batch (or a dict of such by name, whose sum is minimised); ``None`` for models that return their own loss
    :param optimizer: an optimizer over the model's parameters; ``None`` when only evaluating or predicting
    :param callbacks: callbacks, as instances or classes, called in this order
    :param run_history: where metrics are recorded; by default an
        :class:`~pytorch_accel_lite.InMemoryRunHistory`
    :param accelerator: an ``accelerate.Accelerator`` configured by you, e.g. with ``mixed_precision="bf16"``;
        by default one is made by ``_create_accelerator()``
    :param seed: makes each run a function of (code, data, seed): generators are seeded when ``train`` starts and
        the order of the data follows from it; by default no generator is ever seeded
    :param compile_model: compile the model in place before its first run, with ``torch.compile``'s defaults or with the
        arguments in a dict; the names in its state stay as they are
    :param channels_last: lay out the model's weights, and all tensors of 4 dimensions in batches, with the channels
        last in memory, which is faster for convolutions on many devices; shapes stay as they are
    :ivar progress: how far the current or last run has come (:class:`~pytorch_accel_lite.Progress`)
    :ivar run_config: what it was asked to do (:class:`~pytorch_accel_lite.TrainerRunConfig`)
    :ivar recorded_losses: the mean losses of the last epoch or evaluation, by metric name
    :ivar stop_reason: why the last run, of training or evaluation, was stopped early; ``None`` when it was not
    :ivar num_microbatches: how many parts a batch is split into, with ``auto_microbatch``
    :ivar step_metrics: what callbacks have measured in the latest update, by name: numbers, or tensors of one element
        on the device, which are read only by those who show them every so often
    """

    # ------------------------------------------------------------------------------------------ training

    def train(
        self,
        train_dataset: Any,
        num_epochs: int | None = None,
        eval_dataset: Any = None,
        per_device_batch_size: int = 8,
        max_num_train_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None,
        create_scheduler_fn: Callable[..., Any] | None = None,
        train_dataloader_kwargs: dict[str, Any] | None = None,
        eval_dataloader_kwargs: dict[str, Any] | None = None,
        reset_run_history: bool = True,
        collate_fn: Callable[[Any], Any] | None = None,
        resume_from: StrPath | None = None,
        *,
        gradient_clip_norm: float | None = None,
        eval_every_n_epochs: int = 1,
        scheduler_interval: str = "update",
        scheduler_metric: str | None = None,
        auto_microbatch: bool = False,
    ) -> None:
        """Train the model.

        :param train_dataset: a map or iterable dataset; batches are ``(inputs, targets)`` or dicts. A dict of map
            datasets gives dicts of batches, see :class:`~pytorch_accel_lite.data.NamedDatasets`
        :param num_epochs: how many times to go through the training data
        :param eval_dataset: evaluated after an epoch, see ``eval_every_n_epochs``; ``None``: no evaluation; a dict of
            datasets is evaluated one by one, with their names as prefixes of the metrics
        :param per_device_batch_size: samples in a batch of one process
        :param max_num_train_steps: end after this many optimizer updates of the whole job; takes precedence
            over ``num_epochs``
        :param gradient_accumulation_steps: batches of each process in one update
        :param gradient_clip_value: limit the absolute value of each element of the gradients
        :param gradient_clip_norm: limit the total norm of the gradients
        :param create_scheduler_fn: called with the optimizer, returns a scheduler, see ``scheduler_interval``;
            a ``functools.partial`` may hold :class:`TrainerPlaceholderValues`
        :param train_dataloader_kwargs: arguments for the training ``DataLoader`` that replace the defaults
        :param eval_dataloader_kwargs: arguments for the evaluation ``DataLoader`` that replace the defaults
        :param reset_run_history: forget the metrics of earlier runs
        :param collate_fn: makes a batch of a list of samples
        :param resume_from: go on from a training state: its directory, or ``"latest"`` for the newest whole one in the
            ``save_dir`` of the trainer's :class:`~pytorch_accel_lite.callbacks.SaveTrainingStateCallback`, if any.
            Give the same data and arguments as in the run that saved it.
        :param eval_every_n_epochs: evaluate after every n epochs, and after the last
        :param scheduler_interval: the scheduler is stepped after every ``"update"``, or after every ``"epoch"``,
            its evaluation included
        :param scheduler_metric: with ``"epoch"``, the metric whose latest value the scheduler's ``step`` is given, as
            ``ReduceLROnPlateau`` needs; recorded before the end of the epoch's evaluation. Epochs that are not
            evaluated do not step it then.
        :param auto_microbatch: when a batch does not fit into the device's memory, split it, and all that follow, into
            micro-batches, as many as are needed, and add up their gradients, which are those of the whole batch
        :raises NonFiniteLossError: when :class:`~pytorch_accel_lite.callbacks.TerminateOnNaNCallback` saw a loss
            that is infinite or NaN
        """
        request = RunRequest(
            num_epochs,
            max_num_train_steps,
            gradient_accumulation_steps,
            gradient_clip_value,
            gradient_clip_norm,
            scheduler_interval,
            scheduler_metric,
        )
        if self.is_running:
            raise RuntimeError(
                "train() cannot be called within a run, nor while predict_iter() is being iterated over. End that "
                "first: raise StopTrainingError, or close the iterator."
            )
        check_training(self.optimizer, self.accelerator, request, create_scheduler_fn)
        warn_of_a_foreign_optimizer(self)
        self._eval_every_n_epochs = check_positive_int("eval_every_n_epochs", eval_every_n_epochs)
        builds_loader = type(self).create_train_dataloader is not Trainer.create_train_dataloader
        check_data(
            "train_dataset", train_dataset, per_device_batch_size, train_dataloader_kwargs, collate_fn, builds_loader
        )
        if eval_dataset is not None:
            self._check_eval_data(
                "eval_dataset", eval_dataset, per_device_batch_size, eval_dataloader_kwargs, collate_fn
            )
        per_device_batch_size = int(per_device_batch_size)  # of numpy's integers, too
        if isinstance(train_dataset, dict):
            train_dataset = NamedDatasets(train_dataset)
        self.train_dataset, self.collate_fn, self._latest_eval_dataset = train_dataset, collate_fn, eval_dataset
        self.create_scheduler_fn = create_scheduler_fn
        state = find_state(self, resume_from)
        if self.seed is not None:
            set_seed(self.seed, device_specific=True)
        self.data_seed = self._choose_data_seed(state)
        self._train_dataloader = self._shard(
            self.create_train_dataloader(per_device_batch_size, train_dataloader_kwargs), training=True
        )
        self._create_eval_loaders(eval_dataset, per_device_batch_size, eval_dataloader_kwargs)
        self._apply_model_options()  # now, so that a callback's copy of the model has them too
        self._call_event("on_dataloaders_created")
        with self._prepared(training=True):
            self.run_config = self._create_run_config(per_device_batch_size, request)
            self.gradient_window = GradientWindow(
                self.ranks, gradient_accumulation_steps, self.run_config.train_per_device_batch_size
            )
            self.scheduler = self.create_scheduler()
            self._check_scheduler(request)
            self._parameters_outside = [] if self.is_sharded else parameters_outside(self.model, self.optimizer)
            self.ranks.copy_from_first(self._parameters_outside)
            clear_gradients(self.optimizer)  # what a run that failed within a window may have left
            self.accelerator.sync_gradients = True
            was_mid_epoch, self.progress = self.progress.is_mid_epoch, Progress()
            self.step_metrics.clear()
            self._guard, self.num_microbatches = self._create_guard(auto_microbatch), 1
            if reset_run_history:
                self.run_history.reset()
            elif was_mid_epoch:
                self.run_history._increment_epoch()  # past the one in which the run before was stopped
            if state is not None:
                restore(self, state)
            is_ddp = isinstance(self.model, DistributedDataParallel)
            self._must_rehearse = (
                is_ddp and self._guard is None and self.ranks.world_size > 2 and self.progress.update > 0
            )
            try:
                with ending_in_order(self._stop_vote.ask, self._ends_at_signals()):
                    self._run_training(state)
            finally:
                for loader in (self._train_dataloader, *self.eval_dataloaders):
                    if isinstance(loader, ShardedLoader):
                        loader.stop_workers()
        if isinstance(self.interruption, RunInterruptedError):
            exit_for(self.interruption)

    def _create_guard(self, auto_microbatch: bool) -> StepGuard | None:
        """Return what runs the steps when they may fail; ``None`` when a failure is to end the run."""
        splits = auto_microbatch or any(callback.splits_batches for callback in self.callback_handler)
        skips = any(callback.skips_failed_batches for callback in self.callback_handler)
        return StepGuard(self, splits, skips) if splits or skips else None

    def _ends_at_signals(self) -> bool:
        return any(getattr(callback, "save_on_signal", False) for callback in self.callback_handler)

    def _choose_data_seed(self, state: TrainingState | None) -> int | None:
        """Return what the order of the data follows from: ``None`` leaves it to torch's generator."""
        if state is not None:
            return state.metadata["data_seed"]  # type: ignore[no-any-return]
        if self.seed is not None or not any(callback.saves_training_states for callback in self.callback_handler):
            return self.seed
        return self.ranks.broadcast_object(lambda: int(torch.randint(2**62, ()).item()))

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: dict[str, Any] | None = None) -> Iterable[Any]:
        """Return the loader of training batches; override it to build your own.

        Whatever a ``DataLoader`` over a map dataset would read is shared out over the processes; see
        :mod:`pytorch_accel_lite.data` for other iterables.

        :param batch_size: samples in a batch of one process
        :param train_dl_kwargs: the user's arguments, which replace those of :meth:`get_default_train_dl_kwargs`
        """
        self._train_dl_kwargs = merge_loader_kwargs(
            self.train_dataset, self.get_default_train_dl_kwargs(batch_size), train_dl_kwargs
        )
        return DataLoader(self.train_dataset, **({"collate_fn": self.collate_fn} | self._train_dl_kwargs))

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: dict[str, Any] | None = None) -> Iterable[Any]:
        """Return the loader of evaluation batches; see :meth:`create_train_dataloader`."""
        self._eval_dl_kwargs = merge_loader_kwargs(
            self.eval_dataset, self.get_default_eval_dl_kwargs(batch_size), eval_dl_kwargs
        )
        return DataLoader(self.eval_dataset, **({"collate_fn": self.collate_fn} | self._eval_dl_kwargs))

    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the default arguments of the training dataloader: shuffled, workers where they pay."""
        return default_loader_kwargs(self.train_dataset, batch_size, True, self._local_world_size)

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return the default arguments of the evaluation dataloader: in order, workers where they pay."""
        return default_loader_kwargs(self.eval_dataset, batch_size, False, self._local_world_size)

    def create_scheduler(self) -> Any:
        """Return the scheduler of a run, or ``None``: by default what ``create_scheduler_fn(optimizer)`` gives."""
        if self.create_scheduler_fn is None:
            return None
        return replace_trainer_placeholder_values(self, self.create_scheduler_fn)(self.optimizer)

    def _check_scheduler(self, request: RunRequest) -> None:
        steps_itself = type(self).scheduler_step is not Trainer.scheduler_step
        check_scheduler(self.scheduler, request, self.create_scheduler_fn, steps_itself)

    # -------------------------------------------------------------------- training: steps to override

    def training_run_start(self) -> None:
        """Called when a training run starts."""

    def train_epoch_start(self) -> None:
        """Called when an epoch of training starts. By default sets the model to training mode."""
        self.model.train()

    def calculate_train_batch_loss(self, batch: Any) -> BatchOutput:
        """Return the outputs and the loss of a training batch.

        The default understands a tuple or list ``(inputs, targets)``, as ``loss_func(model(inputs), targets)``;
        and a dict, as ``model(**batch)`` with the keys that ``forward`` takes: the remaining ones are the targets
        (a single value is given as it is), or the model returns its own ``loss`` when there is no ``loss_func``.

        :return: a dict with ``loss``, a scalar tensor that is a mean over the batch, or a dict of such by name,
            whose sum is minimised; optionally ``model_outputs``; ``batch_size``, found from the batch when
            missing; ``num_items_in_batch`` when the loss is a mean over something else than samples (tokens, say);
            and anything else that callbacks want to see
        """
        return self._calculate_loss(batch)

    def backward_step(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss, which has been weighted by its share of the accumulation window."""
        if self._preparation is not None and self._preparation.is_plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.accelerator.backward(loss)

    def clip_gradients(self) -> None:
        """Clip the gradients as the run config says. Called once an update, on unscaled gradients."""
        value, norm = self._config.gradient_clip_value, self._config.gradient_clip_norm
        if value is None and norm is None:
            return
        # Accelerate recognises sharded models by their parameters.
        clipped = list(self.model.parameters()) if self.is_sharded else updated_parameters(self.model, self.optimizer)
        if value is not None:
            self.accelerator.clip_grad_value_(clipped, value)
        if norm is not None:
            self._gradient_norm = self.accelerator.clip_grad_norm_(clipped, norm)

    def optimizer_step(self) -> None:
        """Update the weights."""
        self.optimizer.step()

    def scheduler_step(self) -> None:
        """Step the scheduler. Called once an update, unless a gradient scaler skipped it, or once an epoch."""
        if self.scheduler is None:
            return
        metric = self._config.scheduler_metric
        if metric is None:
            self.scheduler.step()
            return
        try:
            value = self.run_history.get_latest_metric(metric)
        except ValueError as error:
            raise ValueError(f"scheduler_metric={metric!r}: {error}") from error
        self.scheduler.step(value)

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients after an update."""
        clear_gradients(self.optimizer)

    def train_epoch_end(self) -> None:
        """Called when an epoch of training ends, before its losses are recorded."""

    def eval_epoch_start(self) -> None:
        """Called when an evaluation starts. By default sets the model to evaluation mode."""
        self.model.eval()

    def calculate_eval_batch_loss(self, batch: Any) -> BatchOutput:
        """Return the outputs and the loss of an evaluation batch, without gradients.

        The default and what is returned are as in :meth:`calculate_train_batch_loss`.
        """
        with torch.no_grad():
            return self._calculate_loss(batch)

    def eval_epoch_end(self) -> None:
        """Called when an evaluation ends, before its losses are recorded."""

    def training_run_epoch_end(self) -> None:
        """Called when an epoch ends, after its evaluation."""

    # ------------------------------------------------------------------------------ training: the loop

    def _run_training(self, resumed: TrainingState | None = None) -> None:
        ended = False
        self.stop_reason, self.interruption = None, None
        self._resumed = resumed
        self._stop_vote.restart()
        try:
            try:
                self.training_run_start()
                self._call_event("on_training_run_start")
                over = self._is_over(resumed)
                if over or not self.progress.is_mid_epoch:
                    self._finish_resuming()
                while not over and (self.progress.is_mid_epoch or not self.is_finished):
                    self._run_epoch()
            except StopTrainingError as stop:
                self._end_early(stop)
            ended = True
            self.training_run_end()
            self._call_ending_event("on_training_run_end")
        except BaseException as error:
            self._close_failed_run(error, ended)
            raise

    def _run_epoch(self) -> None:
        if not self.progress.is_mid_epoch:
            self.progress.start_epoch()
        self._run_train_epoch()
        if self.evaluation_is_due:
            self._run_evaluations()
        self._step_scheduler_after_epoch()
        self.training_run_epoch_end()
        self._call_event("on_training_run_epoch_end")
        self._stop_vote.settle(now=True)
        self.progress.epochs_completed = self.progress.epoch
        self.run_history._increment_epoch()
        self._call_event("on_epoch_checkpoint")
        self._stop_vote.settle(now=True, can_save=True)

    def _step_scheduler_after_epoch(self) -> None:
        """Step a scheduler that is stepped by epochs; one that follows a metric, only when that was to be measured."""
        if self.scheduler is None or self._config.scheduler_interval != "epoch":
            return
        is_measured = self.evaluation_is_due or not self.eval_dataloaders
        if self._config.scheduler_metric is None or is_measured:
            self.scheduler_step()

    def _run_train_epoch(self) -> None:
        self.train_epoch_start()
        self._reset_losses()
        self._call_event("on_train_epoch_start")
        self._finish_resuming()
        loader = self._train_dataloader = self._shard(self._train_dataloader, training=True)
        limit = math.inf if self._update_limit is None else self._update_limit
        steps = loader.steps(self.progress.epoch, self.progress.samples_in_epoch, self.progress.step)
        while self.progress.update < limit and (loaded := next(steps, None)) is not None:
            if self._must_rehearse:
                self._rehearse(loaded.batch)
            self._run_train_step(loaded)
        if not self.progress.step:
            raise ValueError("train_dataset gave no batch in this epoch: is it empty, or exhausted?")
        self._stop_vote.settle(now=True)
        self._sync_buffers()
        self.train_epoch_end()
        self._record_losses("train_{}_epoch")
        self._call_event("on_train_epoch_end")

    def _rehearse(self, batch: Any) -> None:
        """Go forward and back once, and leave no trace but one.

        ``DistributedDataParallel`` arranges gradients anew after its first backward pass. With three processes or more
        the order of their sums, and so the last bits, depend on it: a resumed run must have that behind it, too.
        """
        self._must_rehearse = False
        generators, buffers = generator_states(), [buffer.clone() for buffer in self.model.buffers()]
        self.backward_step(total_loss(self.calculate_train_batch_loss(batch)["loss"]))
        clear_gradients(self.optimizer)
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        set_generator_states(generators)

    def _run_train_step(self, loaded: LoadedBatch) -> None:
        batch, step, self._loaded = loaded.batch, self.progress.step, loaded
        window = self.gradient_window
        assert window is not None
        ends_window = loaded.is_last or (step + 1) % window.steps == 0
        self._call_event("on_train_step_start")
        go_forward_and_back = self._go_forward_and_back if self._guard is None else self._guard.run
        if window.steps == 1:
            output = go_forward_and_back(loaded)
        else:
            with self._gradient_sync(ends_window):
                output = go_forward_and_back(loaded)
        updates = ends_window and window.is_open  # it is not when all its batches were skipped
        if updates:
            self._run_update()
        self.progress.step += 1
        if output is not None:
            self._call_event("on_train_step_end", batch=batch, batch_output=output, step=step)
        if updates:
            self._call_event("on_update_end", step=step)
            self._call_event("on_train_step_checkpoint", step=step)
            self._stop_vote.settle(can_save=True)

    def _go_forward_and_back(self, loaded: LoadedBatch) -> BatchOutput:
        batch, step = loaded.batch, self.progress.step
        output = self.calculate_train_batch_loss(batch)
        loss = self._weigh_loss(output, loaded)
        self._call_event("on_backward_start", batch=batch, batch_output=output, step=step)
        self.backward_step(loss)
        self._call_event("on_backward_end", batch=batch, batch_output=output, step=step)
        return output

    def _run_update(self) -> None:
        assert self.gradient_window is not None
        if self._guard is not None:
            self._guard.finish_window()
        elif self._parameters_outside and self.ranks.world_size > 1:
            average_gradients(self._parameters_outside, self.ranks)
        self.gradient_window.finish(self.optimizer, self.accelerator.device)
        self._gradient_norm, self._skips_update = None, False
        self.clip_gradients()
        self._call_event("on_optimizer_step_start")
        if not self._skips_update:
            self.optimizer_step()
        self.progress.update += 1
        each_update = self.scheduler is not None and self._config.scheduler_interval == "update"
        if each_update and not self.update_was_skipped:
            self.scheduler_step()
        self.optimizer_zero_grad()
        self._call_event("on_optimizer_step_end")

    def _run_evaluations(self, is_training: bool = True, is_intermediate: bool = False) -> dict[str, float]:
        """Evaluate what there is to evaluate; of several datasets, the metrics are prefixed with their names."""
        if not self._eval_loaders and self._eval_dataloader is not None:
            self._run_eval_epoch(self._eval_dataloader, is_training, is_intermediate)
            return self.recorded_losses
        prefix, losses = self.run_history.metric_name_prefix, dict[str, float]()
        for name, loader in self._eval_loaders.items():
            self._eval_dataloader = loader
            self.run_history.set_metric_name_prefix(f"{prefix}{name}_")
            try:
                self._run_eval_epoch(loader, is_training, is_intermediate)
            finally:
                self.run_history.set_metric_name_prefix(prefix)
            losses |= {f"{name}_{metric}": loss for metric, loss in self.recorded_losses.items()}
        return losses

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        self.eval_epoch_start()
        self._reset_losses()
        self._call_event("on_eval_epoch_start", is_intermediate=is_intermediate)
        with self._unwrapped_model(), torch.no_grad():
            for loaded in self._shard(valid_dl, training=False).steps(self.progress.epoch):
                self._loaded = loaded
                self._call_event("on_eval_step_start")
                output = self.calculate_eval_batch_loss(loaded.batch)
                self._complete_output(output, loaded.batch, "calculate_eval_batch_loss", training=False)
                self._track_losses(output, loaded)
                self._call_event("on_eval_step_end", batch=loaded.batch, batch_output=output)
        self.eval_epoch_end()
        self._record_losses(
            "intermediate_eval_{}" if is_intermediate else "eval_{}_epoch" if is_training else "evaluation_{}"
        )
        self._call_event("on_eval_epoch_end", is_intermediate=is_intermediate)
        self._stop_vote.settle(now=True)

    def run_evaluation(
        self,
        model: nn.Module | None = None,
        prefix: str = "",
        is_intermediate: bool = True,
        callbacks: CallbackHandler | None = None,
    ) -> dict[str, float]:
        """Evaluate on the run's ``eval_dataset`` within a training run, of which nothing is changed.

        To be called in a callback, on every process. Weights that are trained later are those that they would have
        been without it: modes, running losses and generators are put back.

        :param model: a module to evaluate in place of the trainer's model, averaged weights say. What is saved
            meanwhile is still the trainer's own.
        :param prefix: put before the names of the metrics in the run history
        :param is_intermediate: passed on to the evaluation's events; losses are recorded as ``intermediate_eval_loss``,
            otherwise as ``eval_loss_epoch``
        :param callbacks: called instead of the trainer's callbacks
        :return: the mean losses by metric name
        :raises RuntimeError: outside of a training run, or in one without an eval_dataset
        """
        if self._preparation is None or self.train_dataloader is None or not self.eval_dataloaders:
            raise RuntimeError(
                "run_evaluation() evaluates within a training run that was given an eval_dataset. Pass one to train(), "
                "or call evaluate(dataset)."
            )
        before, generators = {name: getattr(self, name) for name in _OF_AN_EPOCH}, generator_states()
        prefix_before = self.run_history.metric_name_prefix
        modes = [(module, module.training) for module in self.model.modules()]
        self.run_history.set_metric_name_prefix(f"{prefix_before}{prefix}")
        if callbacks is not None:
            self.callback_handler = callbacks
        if model is not None:
            self.sync_buffers(model)
            self._trained_model, self.model = self.model, model
        try:
            with nullcontext() if model is None else self.accelerator.autocast():
                return self._run_evaluations(is_intermediate=is_intermediate)
        finally:
            vars(self).update(before)
            self.run_history.set_metric_name_prefix(prefix_before)
            set_generator_states(generators)
            for module, mode in modes:
                module.training = mode

    def _is_over(self, resumed: TrainingState | None) -> bool:
        """Whether there is nothing left to do for a resumed run; says so."""
        if resumed is None:
            return False
        reason = resumed.metadata["stop_reason"]
        if reason is not None and not resumed.metadata["interrupted"]:
            self.stop_reason = reason
            self.print(f"Nothing more to do: the run was stopped. {reason}")
            return True
        ends_its_epoch = self.progress.is_mid_epoch and self.progress.update == self._update_limit
        if self.is_finished and not ends_its_epoch:
            self.print("Nothing more to do: the run had finished. Ask for more epochs to go on from its end.")
            return True
        return False

    def _finish_resuming(self) -> None:
        """Put back what must be put back last: what the starting events may have reset, and the generators."""
        if self._resumed is not None:
            state, self._resumed = self._resumed, None
            restore_callbacks(self, state)
            restore_own(self, state)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the current epoch is followed by an evaluation: every n-th epoch and the last, if there are data."""
        epoch = self.progress.epoch
        is_last = self.is_finished or (self._update_limit is None and epoch == self._config.num_epochs)
        return bool(self.eval_dataloaders) and (is_last or epoch % self._eval_every_n_epochs == 0)

    @property
    def is_finished(self) -> bool:
        """Whether the run has made all the epochs or updates it was asked for."""
        if self._update_limit is not None:  # how many epochs these take is an estimate: batches may be skipped
            return self.progress.update >= self._update_limit
        num_epochs = self._config.num_epochs
        return num_epochs is not None and self.progress.epochs_completed >= num_epochs

    # ------------------------------------------------------------------------------- losses and gradients

    def _calculate_loss(self, batch: Any) -> BatchOutput:
        outputs, targets = self._caller.call(self.model, batch)
        loss = self._caller.loss(self.loss_func, outputs, targets, batch)
        return {"loss": loss, "model_outputs": outputs, "batch_size": self._batch_size(batch)}

    def _batch_size(self, batch: Any) -> int:
        """Return how many samples a batch holds, or a part of one."""
        loaded = self._loaded
        known = loaded.num_samples if loaded is not None and batch is loaded.batch else None
        return batch_size_of(batch, known or None)

    def _weigh_loss(self, output: BatchOutput, loaded: LoadedBatch) -> torch.Tensor:
        """Track the losses of a step and return the one to minimise, weighted by its share of the window."""
        self._complete_output(output, loaded.batch, "calculate_train_batch_loss", training=True)
        size, total = self._track_step(output, loaded)
        assert self.gradient_window is not None
        return self.gradient_window.scale(output["loss"], size, total, output.get("num_items_in_batch"))

    def _track_step(self, output: BatchOutput, loaded: LoadedBatch) -> tuple[int, int]:
        """Add a training step to the running means and the progress; return its samples, here and in the whole job."""
        size = self._track_losses(output, loaded)
        total = size if loaded.total_samples is None else loaded.total_samples
        self.progress.add_samples(total)
        return size, total

    def _complete_output(self, output: BatchOutput, batch: Any, method: str, training: bool) -> None:
        """Check what a step returned, and add what it left out."""
        check_loss(output, method, training)
        if "batch_size" not in output:
            output["batch_size"] = self._batch_size(batch)
        size = output["batch_size"]
        if type(size) is not int or size < 1:
            check_batch_size(size, method)
        if not isinstance(output["loss"], torch.Tensor):
            losses = output["loss"]
            output["loss"] = total_loss(losses)
            if losses.keys() != {"loss"}:
                output["losses"] = losses

    def _track_losses(self, output: BatchOutput, loaded: LoadedBatch) -> int:
        """Add the losses of a step to the running means, return the samples of this process."""
        if loaded.num_samples == 0:  # a batch that only keeps this process in step with the others
            output["batch_size"] = 0
            return 0
        weight = output.get("num_items_in_batch", output["batch_size"])
        self.loss_trackers["loss"].update(output["loss"], weight)
        for name, loss in output["losses"].items() if "losses" in output else ():
            self.loss_trackers.setdefault(name, LossTracker()).update(loss, weight)
        return int(output["batch_size"]) if loaded.num_samples is None else loaded.num_samples

    def _reset_losses(self) -> None:
        self.loss_trackers = {"loss": LossTracker()}

    def _record_losses(self, name: str) -> None:
        """Record the epoch's mean losses over all ranks under ``name``, in which the loss's own name is put."""
        recorded = {}
        for key, (total, count) in self._summed_losses().items():
            if not count and name.startswith("train"):
                raise ValueError("Every batch of the epoch was skipped.")
            if not count:
                raise ValueError("eval_dataset gave no batch: it is empty, or exhausted.")
            recorded[name.format(key)] = total / count
        for metric, value in recorded.items():
            self.run_history.update_metric(metric, value)
        self.recorded_losses = recorded

    @property
    def _loss_tracker(self) -> LossTracker:
        return self.loss_trackers["loss"]

    @property
    def running_loss(self) -> float:
        """The mean loss of the epoch so far, on this process. Reads the device: not for every step."""
        return self._loss_tracker.average

    def _gradient_sync(self, ends_window: bool) -> AbstractContextManager[Any]:
        """Within a window, gradients stay on their rank; they are averaged once, at its end."""
        self.accelerator.sync_gradients = ends_window
        if ends_window or self.ranks.world_size == 1:
            return _NOTHING
        return self.accelerator.no_sync(self.model)  # type: ignore[no-any-return]

    @property
    def update_was_skipped(self) -> bool:
        """Whether the last update was left out: by :meth:`skip_update`, or by a gradient scaler that met infinities."""
        assert self._preparation is not None
        return self._skips_update or (not self._preparation.is_plain and self.accelerator.optimizer_step_was_skipped)

    def skip_update(self) -> None:
        """Leave out the update that is about to happen: weights, optimizer and scheduler stay as they are.

        To be called in ``on_optimizer_step_start``, on every process. ``progress.update`` counts it all the same.
        """
        self._skips_update = True
        scaler = self.accelerator.scaler
        if scaler is not None:  # it would complain of gradients that are unscaled twice
            scaler.update(scaler.get_scale())

    @property
    def gradient_norm(self) -> torch.Tensor:
        """The total norm of the gradients of an update, on the device; before they were clipped by norm, if they were.

        For ``on_optimizer_step_start``. The same on all processes; computed when first asked for.
        """
        if self._gradient_norm is None:
            if self.accelerator.scaler is not None and self._config.gradient_clip_value is None:
                self.accelerator.unscale_gradients(self.optimizer)
            gradients = [
                parameter.grad for parameter in optimized_parameters(self.optimizer) if parameter.grad is not None
            ]
            self._gradient_norm = nn.utils.get_total_norm(gradients)
        return self._gradient_norm

    def diagnose(
        self,
        train_dataset: Any,
        per_device_batch_size: int = 8,
        num_steps: int = 200,
        train_dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> Diagnosis:
        """Find out what limits the speed of training, and say what to change.

        Reads data without training, goes forward without going back, and trains, for so many steps each, without
        callbacks. The model, the optimizer and the generators are put back afterwards. To be called on every process.

        :param num_steps: steps of each kind
        :return: the measurements and the advice, which are also printed
        """
        check_positive_int("num_steps", num_steps)
        request = RunRequest(num_epochs=1)
        with self._trial(
            "diagnose", train_dataset, per_device_batch_size, request, train_dataloader_kwargs, collate_fn
        ):
            found = diagnose(self, num_steps)
        self.print(found)
        return found

    def find_lr(
        self,
        train_dataset: Any,
        per_device_batch_size: int = 8,
        min_lr: float = 1e-6,
        max_lr: float = 10.0,
        num_steps: int = 100,
        gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None,
        train_dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        *,
        gradient_clip_norm: float | None = None,
        diverged: float = 4.0,
    ) -> LearningRates:
        """Try learning rates from small to large, one an update, and suggest one (a learning rate range test).

        Smith, "Cyclical Learning Rates for Training Neural Networks" (2017). Everything is put back afterwards: the
        model, the optimizer, the generators; the history and the callbacks see nothing of it. To be called on every
        process. Other arguments are those of :meth:`train`.

        :param min_lr: the first learning rate; of the parameter group with the largest, to which others stay in
            proportion
        :param max_lr: the last
        :param num_steps: updates, at least 10
        :param diverged: stop when the smoothed loss is so many times its smallest value
        :return: the rates, the losses, a ``suggestion`` and ``plot()``; what it says is also printed
        """
        check_range_test(min_lr, max_lr, num_steps)
        check_range("diverged", diverged, above=1)
        request = RunRequest(1, None, gradient_accumulation_steps, gradient_clip_value, gradient_clip_norm)
        with self._trial("find_lr", train_dataset, per_device_batch_size, request, train_dataloader_kwargs, collate_fn):
            found = range_test(self, min_lr, max_lr, num_steps, diverged)
        self.print(found)
        return found

    def find_batch_size(
        self,
        train_dataset: Any,
        start: int = 2,
        max_batch_size: int | None = None,
        num_steps: int = 2,
        train_dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> int:
        """Find the largest batch size of a process with which training fits into memory.

        Sizes are doubled until one does not fit, and then halved between; all processes agree. Everything is put back
        afterwards, as with :meth:`find_lr`. The largest that fits just fits: a little less is safer where samples
        differ in size.

        :param start: the first size to try
        :param max_batch_size: do not try larger ones; by default the share of the dataset that a process gets
        :param num_steps: updates to be made with each size
        :raises RuntimeError: when not even one sample fits
        """
        check_positive_int("start", start)
        check_positive_int("num_steps", num_steps)
        fixed = {"batch_size", "batch_sampler"} & set(train_dataloader_kwargs or {})
        if fixed:
            raise ValueError(f"train_dataloader_kwargs has {sorted(fixed)}: find_batch_size() tries sizes of its own.")
        data = NamedDatasets(train_dataset) if isinstance(train_dataset, dict) else train_dataset
        if not hasattr(data, "__len__"):
            raise TypeError(f"train_dataset: {type(data).__name__} has no length, which find_batch_size() needs.")
        most = len(data) // self.ranks.world_size
        if max_batch_size is not None:
            most = min(most, check_positive_int("max_batch_size", max_batch_size))
        if most < 1:
            raise ValueError(f"train_dataset has {len(data)} samples: too few for a batch on every process.")

        def load(size: int) -> Any:
            loader = self._shard(self.create_train_dataloader(size, train_dataloader_kwargs), training=True)
            try:
                return next(iter(loader.steps(1))).batch
            finally:
                loader.stop_workers()

        request = RunRequest(num_epochs=1)
        with self._trial("find_batch_size", train_dataset, 1, request, train_dataloader_kwargs, collate_fn):
            self.train_epoch_start()
            found = largest_batch(self, load, start, most, num_steps)
        if not found:
            raise RuntimeError("Not even a batch of one sample fits into memory.")
        self.print(f"The largest batch size that fits is {found}{' (the most there is)' if found == most else ''}.")
        return found

    @contextmanager
    def _trial(
        self, name: str, train_dataset: Any, batch_size: int, request: RunRequest, loader_kwargs: Any, collate_fn: Any
    ) -> Iterator[None]:
        """Set the trainer up for training outside of a run, and put everything back."""
        check_training(self.optimizer, self.accelerator, request, None)
        if self._preparation is not None:
            raise RuntimeError(f"{name}() cannot be called within a run. Call it before train().")
        check_data("train_dataset", train_dataset, batch_size, loader_kwargs, collate_fn, False)
        names = (*_OF_A_RUN, "train_dataset", "data_seed", "gradient_window", "_gradient_norm")
        before = {name: getattr(self, name) for name in names}
        self.train_dataset = NamedDatasets(train_dataset) if isinstance(train_dataset, dict) else train_dataset
        self.collate_fn, self.data_seed = collate_fn, self.seed or 0
        try:
            loader = self.create_train_dataloader(batch_size, loader_kwargs)
            self._train_dataloader = self._shard(loader, training=True)
            with self._prepared(training=True), unchanged(self):
                self.run_config = self._create_run_config(batch_size, request)
                self.gradient_window = GradientWindow(self.ranks, request.gradient_accumulation_steps, batch_size)
                yield
        finally:
            if isinstance(self._train_dataloader, ShardedLoader):
                self._train_dataloader.stop_workers()
            vars(self).update(before)

    # ---------------------------------------------------------------------------- evaluation, prediction

    def evaluate(
        self,
        dataset: Any = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> dict[str, Any]:
        """Evaluate the model. Every sample counts once, on any number of processes.

        :param dataset: by default the ``eval_dataset`` of the last training run; a dict of datasets is evaluated
            one by one, with their names as prefixes of the metrics
        :param per_device_batch_size: samples in a batch of one process
        :param dataloader_kwargs: arguments for the ``DataLoader`` that replace the defaults
        :param collate_fn: makes a batch of a list of samples
        :return: the latest value of every metric recorded during this evaluation, by name. They are added to the
            run history too, which keeps what it held.
        """
        dataset = self._latest_eval_dataset if dataset is None else dataset
        self._check_eval_data("dataset", dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
        known = {name: len(self.run_history.get_metric_values(name)) for name in self.run_history.get_metric_names()}
        within_a_run, stopped = self.is_running, None
        run = self._eval_run(dataset, per_device_batch_size, dataloader_kwargs, collate_fn, keep=True)
        with self._in_last_epoch(), run:
            try:
                if not within_a_run:
                    self.stop_reason = None
                    self._stop_vote.forget()
                try:
                    self._call_event("on_dataloaders_created")
                    self.evaluation_run_start()
                    self._call_event("on_evaluation_run_start")
                    self._run_evaluations(is_training=False)
                except StopTrainingError as stop:
                    stopped = stop
                    if not within_a_run:
                        self._end_early(stop)
                self.evaluation_run_end()
                self._call_ending_event("on_evaluation_run_end")
            except BaseException as error:
                self._close_failed_run(error, ended=True)
                raise
        if stopped is not None and within_a_run:
            raise stopped  # it ends that run
        return {
            name: self.run_history.get_latest_metric(name)
            for name in self.run_history.get_metric_names()
            if len(self.run_history.get_metric_values(name)) > known.get(name, 0)
        }

    @contextmanager
    def _in_last_epoch(self) -> Iterator[None]:
        """After a run, record metrics with its last epoch, not with one that has not been trained."""
        epoch = self.run_history.current_epoch
        if self._preparation is None and self.progress.epochs_completed and not self.progress.is_mid_epoch:
            self.run_history._set_epoch(epoch - 1)
        try:
            yield
        finally:
            self.run_history._set_epoch(epoch)

    def evaluation_run_start(self) -> None:
        """Called when ``evaluate`` starts."""

    def evaluation_run_end(self) -> None:
        """Called when ``evaluate`` ends."""

    def predict(
        self,
        dataset: Any,
        per_device_batch_size: int = 8,
        dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return the model's outputs for every sample, in the order of the dataset, on the CPU.

        :param dataset: a dataset whose samples may or may not hold targets, which are not used
        :param per_device_batch_size: samples in a batch of one process
        :param dataloader_kwargs: arguments for the ``DataLoader`` that replace the defaults
        :param collate_fn: makes a batch of a list of samples
        :return: what the model returns for a batch, concatenated over all samples: a tensor of shape
            ``(len(dataset), ...)``, or tuples, lists and dicts of such; the same on every process
        """
        parts = list(self.predict_iter(dataset, per_device_batch_size, dataloader_kwargs, collate_fn))
        if not parts:
            raise ValueError(
                f"dataset gave no batch: {type(dataset).__name__} is empty, or exhausted; or all has been predicted "
                "already, and written by a PredictionWriterCallback: read it with read_predictions()."
            )
        return concatenate(parts)

    def predict_iter(
        self,
        dataset: Any,
        per_device_batch_size: int = 8,
        dataloader_kwargs: dict[str, Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield what :meth:`predict` returns in parts, in the order of the dataset, the same on every process.

        Only a few batches are in memory at any time. To be iterated to its end on every process; meanwhile the
        model is in evaluation mode.
        """
        self._check_eval_data("dataset", dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
        if isinstance(dataset, dict):
            raise TypeError(f"dataset: predict takes one dataset, not a dict of {sorted(dataset)}. Call it for each.")
        run = self._eval_run(dataset, per_device_batch_size, dataloader_kwargs, collate_fn, keep=False)
        with run, evaluation_mode(self.model):
            try:
                self._call_event("on_predict_run_start")
                outputs = self._predict_batches()
                while parts := [p for p in self.ranks.all_gather_object(next(outputs, None)) if p is not None]:
                    yield concatenate(parts)
                self._call_event("on_predict_run_end")
            except GeneratorExit:  # who iterates has seen enough
                self._call_event("on_predict_run_end")
                raise
            except BaseException as error:
                self._close_failed_run(error, ended=True)
                raise

    def _predict_batches(self) -> Iterator[Any]:
        for loaded in self._eval_dataloader.steps(self.progress.epoch, self._eval_dataloader.start):
            self._loaded = loaded
            with self._unwrapped_model(), torch.no_grad():
                output = self.calculate_predict_batch_output(loaded.batch)
            self._call_event("on_predict_step_end", batch=loaded.batch, batch_output=output)
            if loaded.num_samples != 0:
                yield to_cpu(output, batch_size_of(loaded.batch, loaded.num_samples) if type(output) is list else None)

    def calculate_predict_batch_output(self, batch: Any) -> Any:
        """Return the model's outputs for a batch in ``predict``; override it to post-process them.

        By default the first element of a tuple or list, or the keys of a dict that ``forward`` takes and that are
        no targets, are given to the model.
        """
        return self._caller.predict(self.model, batch)

    @contextmanager
    def _eval_run(
        self, dataset: Any, batch_size: int, loader_kwargs: dict[str, Any] | None, collate_fn: Any, keep: bool
    ) -> Iterator[None]:
        """Set the trainer up to evaluate a dataset.

        :param keep: keep what was set up, as that of the latest run; never within a training run, whose own is put back
        """
        running = self._preparation is not None
        before = {name: getattr(self, name) for name in _OF_A_RUN}
        self.eval_dataset, self.collate_fn, batch_size = dataset, collate_fn, int(batch_size)
        try:
            self._create_eval_loaders(dataset, batch_size, loader_kwargs)
            modes = evaluation_mode(self.model) if running else nullcontext()
            with modes, self._prepared(training=False):
                if not running:
                    self._train_dataloader = self._train_dl_kwargs = None
                    self.run_config = self._create_run_config(batch_size, RunRequest(num_epochs=1))
                yield
        finally:
            for loader in self.eval_dataloaders:
                loader.stop_workers()
            if running or not keep:
                vars(self).update(before)

    def _check_eval_data(self, name: str, dataset: Any, batch_size: int, loader_kwargs: Any, collate_fn: Any) -> None:
        builds_loader = type(self).create_eval_dataloader is not Trainer.create_eval_dataloader
        check_data(name, dataset, batch_size, loader_kwargs, collate_fn, builds_loader)

    def _create_eval_loaders(self, dataset: Any, batch_size: int, loader_kwargs: dict[str, Any] | None) -> None:
        self._eval_dataloader, self._eval_loaders = None, {}
        for name, self.eval_dataset in dataset.items() if isinstance(dataset, dict) else [("", dataset)]:
            if self.eval_dataset is None:
                return
            self._eval_dataloader = self._shard(self.create_eval_dataloader(batch_size, loader_kwargs), training=False)
            if has_no_batch(self._eval_dataloader):
                raise ValueError(
                    "eval_dataset makes no batch: with drop_last=True it needs at least a batch for every process."
                )
            if name:
                self._eval_loaders[name] = self._eval_dataloader
        self.eval_dataset = dataset


class TrainerWithTimmScheduler(Trainer):
    """A :class:`Trainer` for timm's schedulers, stepped as timm's own training script does (extra ``timm``).

    ``step_update(num_updates)`` is called after every update, and ``step(epoch, metric)`` after every epoch, with the
    number of finished epochs and the latest loss. The scheduler's own ``t_in_epochs`` says which takes effect.
    """

    @property
    def num_updates(self) -> int:
        """The number of updates made in this run."""
        return self.progress.update

    def scheduler_step(self) -> None:  # noqa: D102
        if self.scheduler is not None:
            self.scheduler.step_update(num_updates=self.num_updates)

    def training_run_epoch_end(self) -> None:  # noqa: D102
        if self.scheduler is not None:
            self.scheduler.step(self.progress.epoch, next(iter(self.recorded_losses.values())))

    def _check_scheduler(self, request: RunRequest) -> None:
        super()._check_scheduler(request)
        if request.scheduler_interval != "update":
            raise ValueError(
                f"scheduler_interval={request.scheduler_interval!r}: TrainerWithTimmScheduler steps timm's schedulers "
                "after updates and epochs, as they need it. Leave scheduler_interval and scheduler_metric out."
            )
        scheduler = self.scheduler
        if scheduler is not None and not (hasattr(scheduler, "step_update") and takes(scheduler.step, 1, 0.0)):
            raise TypeError(
                f"create_scheduler_fn returned {type(scheduler).__name__}, which is not stepped as timm's schedulers "
                "are: step_update(num_updates), step(epoch, metric). Use Trainer for it."
            )
