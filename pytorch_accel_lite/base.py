"""What a trainer has besides its loop: its state, its processes and devices, saving and loading."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite import lifecycle
from pytorch_accel_lite.batches import ModelCaller
from pytorch_accel_lite.callbacks import (
    DEFAULT_CALLBACKS,
    CallbackHandler,
    NonFiniteLossError,
    RunPausedError,
    StopTrainingError,
    TrainerCallback,
)
from pytorch_accel_lite.callbacks.limits import limit_from_environment
from pytorch_accel_lite.checkpoint import (
    fit_model_state,
    gathered,
    load_optimizer_state,
    model_state,
    read_checkpoint,
    write_checkpoint,
    write_weights,
)
from pytorch_accel_lite.checkpoint.background import BackgroundWriter
from pytorch_accel_lite.checkpoint.training_state import read_state, write_state
from pytorch_accel_lite.data import LoadedBatch, ShardedLoader, shard
from pytorch_accel_lite.distributed import Ranks, StopVote, check_launch
from pytorch_accel_lite.events import timed
from pytorch_accel_lite.gradients import GradientWindow, optimized_parameters
from pytorch_accel_lite.guarding import StepGuard
from pytorch_accel_lite.preparation import Preparation, unwrap
from pytorch_accel_lite.resuming import check_states_are_possible, collect, restore, restore_callbacks, restore_own
from pytorch_accel_lite.run_config import RunRequest, TrainerRunConfig, resolve_run_config
from pytorch_accel_lite.signals import die_with_launcher
from pytorch_accel_lite.tracking import InMemoryRunHistory, LossTracker, Progress, RunHistory
from pytorch_accel_lite.validation import check_constructor, check_model_options

if TYPE_CHECKING:
    from typing_extensions import Self

StrPath = str | os.PathLike[str]
T = TypeVar("T")


class TrainerBase:
    """The ground that :class:`~pytorch_accel_lite.Trainer` stands on; its loop is there."""

    def __init__(
        self,
        model: nn.Module,
        loss_func: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer | None,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
        *,
        accelerator: Accelerator | None = None,
        seed: int | None = None,
        compile_model: bool | dict[str, Any] = False,
        channels_last: bool = False,
    ) -> None:
        die_with_launcher()
        check_constructor(model, loss_func, optimizer, run_history, accelerator, seed)
        check_model_options(compile_model, channels_last)
        self.model = model
        self.loss_func = loss_func
        self.optimizer: Any = optimizer
        self.callback_handler = self._create_callback_handler(callbacks)
        self.run_history: RunHistory = InMemoryRunHistory() if run_history is None else run_history
        self.accelerator = accelerator if accelerator is not None else self._create_accelerator()
        self._accelerator = self.accelerator  # the name that the ancestor's users know
        check_launch(self.accelerator)
        self.seed = None if seed is None else int(seed)  # generators refuse numpy's integers
        self.compile_model = compile_model
        self.channels_last = channels_last
        self.progress = Progress()
        self.run_config: TrainerRunConfig | None = None
        self.stop_reason: str | None = None
        self.scheduler: Any = None
        self.create_scheduler_fn: Callable[..., Any] | None = None
        self.collate_fn: Callable[[Any], Any] | None = None
        self.train_dataset: Any = None
        self.eval_dataset: Any = None
        self._latest_eval_dataset: Any = None
        self._train_dataloader: Any = None
        self._eval_dataloader: Any = None
        self._eval_loaders: dict[str, Any] = {}
        self._train_dl_kwargs: dict[str, Any] | None = None
        self._eval_dl_kwargs: dict[str, Any] | None = None
        self._update_limit: int | None = None
        self._eval_every_n_epochs = 1
        self._must_rehearse = False
        self._parameters_outside: list[nn.Parameter] = []
        self._gradient_norm: torch.Tensor | None = None
        self._skips_update = False
        self._guard: StepGuard | None = None
        self.num_microbatches = 1
        self._trained_model: nn.Module | None = None  # while run_evaluation() has another one in its place
        self.ranks = Ranks(self.accelerator)
        self._stop_vote = StopVote(self.ranks)
        self._preparation: Preparation | None = None
        self._caller = ModelCaller(model)
        self.loss_trackers = {"loss": LossTracker()}
        self.gradient_window: GradientWindow | None = None
        self.registered_objects: dict[str, Any] = {}
        self.data_seed = self.seed
        self.interruption: RunPausedError | None = None
        self.recorded_losses: dict[str, float] = {}
        self.step_metrics: dict[str, Any] = {}
        self._loaded: LoadedBatch | None = None
        lifecycle.register(self)
        self.callback_handler.call_event("on_init_end", self)

    def _create_callback_handler(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback]]) -> CallbackHandler:
        handler = CallbackHandler(callbacks)
        handler.add_callbacks(limit_from_environment())
        return handler

    def _create_accelerator(self) -> Accelerator:
        """Make the ``Accelerator``, once, when none was given. Gradients are reduced where they lie, not in copies."""
        return Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])

    def training_run_end(self) -> None:
        """Called when a training run ends."""

    # ------------------------------------------------------------------------------------ events

    def _call_event(self, event: str, **kwargs: Any) -> None:
        """Fire an event. What ends the run is raised after it on one process, and put to the vote on several.

        A pause waits for the next moment from which the run can go on exactly.
        """
        if not self.callback_handler.listeners[event]:
            return
        if self.ranks.world_size > 1:
            self.callback_handler.call_each(event, self._stop_vote.ask, self, **kwargs)
            return
        try:
            self.callback_handler.call_event(event, self, **kwargs)
        except RunPausedError as pause:
            self._stop_vote.ask(pause)

    def _close_failed_run(self, error: BaseException, ended: bool) -> None:
        """Tell the callbacks that an error ends the run; the error itself goes on to the caller.

        A rank that fails alone does not fire the ending events: they may communicate, and its peers are not there.
        """
        self._stop_vote.forget()
        together = self.ranks.world_size == 1 or isinstance(error, NonFiniteLossError)
        problems = self.callback_handler.tell_all("on_exception", self, exception=error)
        if together and not ended:
            try:
                self.training_run_end()
            except Exception as failure:
                problems.append(failure)
            problems += self.callback_handler.tell_all("on_training_run_end", self)
        for problem in problems:
            text = "".join(traceback.format_exception(problem))
            with suppress(OSError):  # where nobody reads the output any more, the error itself still goes on
                self.print(f"While the run was being ended by {error!r}, this happened too:\n{text}")

    def _call_ending_event(self, event: str) -> None:
        """Fire an event when the run is ending anyway: there is nothing left to stop."""
        try:
            self._call_event(event)
            if self.ranks.world_size > 1:
                self._stop_vote.settle(now=True)
        except StopTrainingError as stop:
            self.stop_reason = self.stop_reason or str(stop)

    def _end_early(self, stop: StopTrainingError) -> None:
        """Note why a run is stopped, say it, and tell the callbacks."""
        self.stop_reason = str(stop) or type(stop).__name__
        self.interruption = stop if isinstance(stop, RunPausedError) else None
        self.print(self.stop_reason)
        self._call_ending_event("on_stop_training_error")

    # ------------------------------------------------------------------------------------ saving, loading

    @timed("saving")
    def save_checkpoint(
        self,
        save_path: StrPath,
        checkpoint_kwargs: dict[str, Any] | None = None,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        save_per_node: bool = True,
    ) -> None:
        """Save the weights as one portable file, written whole or not at all. To be called on every process.

        :param save_path: usually ends in ``.pt``; missing folders are made
        :param checkpoint_kwargs: further entries of the file
        :param save_optimizer: include the optimizer's state
        :param save_scheduler: include the scheduler's state, if there is a scheduler
        :param save_per_node: save once on every machine; ``False``: once in the whole job
        """
        here = self.accelerator.is_local_main_process if save_per_node else self.accelerator.is_main_process
        checkpoint = {"model_state_dict": model_state(self.get_model(keep_torch_compile=False), here)}
        if save_optimizer and self.optimizer is not None:
            checkpoint["optimizer_state_dict"] = gathered(self.optimizer.state_dict(), here)
        if save_scheduler and self.scheduler is not None:
            checkpoint["scheduler_state_dict"] = self.scheduler.state_dict()
        checkpoint.update(checkpoint_kwargs or {})
        self.ranks.barrier()
        if here:
            write_checkpoint(checkpoint, save_path)
        self.ranks.barrier()

    def load_checkpoint(
        self, checkpoint_path: StrPath, load_optimizer: bool = True, load_scheduler: bool = True, *, strict: bool = True
    ) -> dict[str, Any]:
        """Load weights saved by :meth:`save_checkpoint`, without running code from the file.

        :param load_optimizer: load the optimizer's state too, if it was saved
        :param load_scheduler: load the scheduler's state too, if it was saved and there is a scheduler
        :param strict: ``False`` to load the weights that fit, and to warn of the others
        :return: the whole content of the file
        :raises ValueError: when it does not fit the model; lists missing and unexpected keys
        """
        self.ranks.barrier()
        checkpoint = read_checkpoint(checkpoint_path)
        model = self.get_model(keep_torch_compile=False)
        weights = fit_model_state(model, checkpoint["model_state_dict"], checkpoint_path, strict)
        if load_optimizer and "optimizer_state_dict" in checkpoint:
            if self.optimizer is None:
                raise ValueError(
                    f"The checkpoint {os.fspath(checkpoint_path)!r} holds an optimizer's state, but the trainer has "
                    "no optimizer. Pass load_optimizer=False, or give the trainer an optimizer."
                )
            load_optimizer_state(self.optimizer, checkpoint["optimizer_state_dict"])
        if load_scheduler and self.scheduler is not None and "scheduler_state_dict" in checkpoint:
            self.scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
        model.load_state_dict(weights, strict=strict)
        return checkpoint

    @timed("saving")
    def save_model(self, path: StrPath) -> None:
        """Save the weights only, as safetensors, whole or not at all, once in the job. For use by others.

        To be called on every process.

        :param path: usually ends in ``.safetensors``; missing folders are made
        """
        weights = model_state(self.get_model(keep_torch_compile=False), keep=self.accelerator.is_main_process)
        self.ranks.run_together(lambda: write_weights(weights, path), only_first=True)

    def check_weights(self) -> None:
        """Check that what is trained is finite, and no buffer NaN, before it replaces what was saved. Reads the device.

        To be called on every process.

        :raises NonFiniteLossError: on all processes, when a weight is infinite or NaN on one
        """
        trained = self.model.parameters() if self.is_sharded else optimized_parameters(self.optimizer)
        weights = [w for w in trained if w.is_floating_point() and w.itemsize > 1]
        # Buffers may be infinite, as masks are.
        buffers = [b for b in self.model.buffers() if b.is_floating_point() and b.itemsize > 1]
        finite = all(bool(getattr(weight, "_local_tensor", weight).isfinite().all()) for weight in weights)
        finite = finite and not any(bool(getattr(buffer, "_local_tensor", buffer).isnan().any()) for buffer in buffers)
        if self.ranks.max([float(not finite)])[0]:
            raise NonFiniteLossError(
                f"Weights are infinite or NaN after update {self.progress.update}, and were not saved. Lower the "
                "learning rate, clip the gradients, or go on from an earlier state with SkipFailedBatchesCallback or "
                "GradientSpikeCallback."
            )

    def _summed_losses(self) -> dict[str, tuple[float, float]]:
        """Return, by name, the sums of the losses so far and of their weights, over all ranks. Reads the device."""
        mine = {key: (float(t.total_loss), float(t.running_count)) for key, t in self.loss_trackers.items()}
        summed: dict[str, tuple[float, float]] = {}
        for sums in self.ranks.all_gather_object(mine):
            for key, (total, count) in sums.items():
                before = summed.get(key, (0.0, 0.0))
                summed[key] = before[0] + total, before[1] + count
        return summed

    @property
    def clock(self) -> float:
        """Seconds since the start of the run, the same on every process (as of their last talk)."""
        return self._stop_vote.clock

    def register_for_checkpointing(self, name: str, obj: Any) -> None:
        """Make an object of yours a part of every training state.

        :param name: what it is called there; the same in the run that resumes
        :param obj: has ``state_dict()``, the same on every process, and ``load_state_dict(state)``
        """
        if not hasattr(obj, "state_dict") or not hasattr(obj, "load_state_dict"):
            raise TypeError(f"{name}={obj!r} must have state_dict() and load_state_dict(state).")
        if name in self.registered_objects:
            raise ValueError(f"An object is already registered as {name!r}. Choose another name.")
        self.registered_objects[name] = obj

    @timed("saving")
    def save_training_state(
        self,
        directory: StrPath,
        checkpoint_kwargs: dict[str, Any] | None = None,
        *,
        writer: BackgroundWriter | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Save all that the run needs to go on, as a directory that is whole or does not exist.

        To be called on every process, between updates: in ``on_train_step_checkpoint`` or ``on_epoch_checkpoint``,
        or after a run.

        :param directory: the state's name; a state of this name is replaced when the new one is whole
        :param checkpoint_kwargs: further entries, returned by :meth:`load_training_state`
        :param writer: copy the state to host memory and let this write it while training goes on
        :param then: called on every process when the state is whole
        :raises TypeError: when a value cannot be stored without pickle; names the path to it
        :raises OSError: when it cannot be written
        :raises RuntimeError: within an accumulation window, or in an epoch whose order does not follow from a seed
        """
        if self.gradient_window is not None and self.gradient_window.is_open:
            raise RuntimeError(
                "A training state can only be saved between updates. Save it in on_train_step_checkpoint or "
                "on_epoch_checkpoint."
            )
        if self.progress.is_mid_epoch and self.data_seed is None:
            raise RuntimeError(
                "The order of this epoch does not follow from a seed, so a run could not go on in its middle. Give the "
                "trainer a seed or a SaveTrainingStateCallback, or save in on_epoch_checkpoint."
            )
        check_states_are_possible(self.accelerator)
        if writer is not None:
            writer.wait()  # before what it holds in memory is held twice
        snapshot = collect(self, dict(checkpoint_kwargs or {}))

        def write(ranks: Ranks = self.ranks) -> None:
            write_state(Path(directory), ranks, snapshot)
            if then is not None:
                then()

        if writer is None:
            write()
        else:
            snapshot = snapshot.to_host()
            writer.start(lambda: write(writer.ranks))

    def load_training_state(self, directory: StrPath) -> dict[str, Any]:
        """Load a training state into the trainer, outside of a run; to go on with a run see ``train(resume_from=)``.

        :return: the state's metadata, and what was given as ``checkpoint_kwargs``
        :raises DamagedStateError: when the state is not whole; names the file
        :raises ValueError: when it does not fit the model or the optimizer
        """
        state = read_state(Path(directory), self.ranks)
        restore(self, state)
        restore_callbacks(self, state)
        restore_own(self, state)
        return {**state.metadata, **state.shared["extra"]}

    def get_model(self, keep_torch_compile: bool = True) -> nn.Module:
        """Return the model without what it is wrapped in for distributed training.

        :param keep_torch_compile: ``False`` also takes it out of ``torch.compile``'s wrapper
        """
        model = self.model if self._trained_model is None else self._trained_model
        if self._preparation is not None and not self._preparation.can_unwrap:
            return self.accelerator.unwrap_model(  # type: ignore[no-any-return]
                model, keep_torch_compile=keep_torch_compile
            )
        return unwrap(model, keep_torch_compile)

    @property
    def can_rewrap_model(self) -> bool:
        """Whether :meth:`rewrap_model` works: not with sharded weights, nor when Accelerate compiled the wrapper."""
        return self._preparation is None or self._preparation.can_rewrap(self.model)

    def rewrap_model(self) -> None:
        """Tell ``DistributedDataParallel`` that other parameters are trained now. To be called on every process.

        Call it after freezing or unfreezing in the middle of a run, between updates, as in ``on_train_epoch_start``:
        otherwise gradients of unfrozen parameters would not be averaged. With one process it does nothing.

        :raises RuntimeError: when the weights are sharded, or Accelerate has compiled the wrapper
        """
        if self._preparation is None:
            return
        if not self.can_rewrap_model:
            raise RuntimeError(
                "The parameters that are trained cannot change in the middle of this run: the model is sharded "
                f"({self.accelerator.distributed_type.value}) or was compiled by Accelerate together with its wrapper. "
                "Freeze before the run, or compile the model yourself with torch.compile."
            )
        self.model = self._preparation.rewrap(self.model)

    # ---------------------------------------------------------------------------- processes and devices

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.accelerator.device  # type: ignore[no-any-return]

    @property
    def train_dataloader(self) -> Any:
        """This process's training batches."""
        return self._train_dataloader

    @property
    def eval_dataloader(self) -> Any:
        """This process's evaluation batches."""
        return self._eval_dataloader

    @property
    def eval_dataloaders(self) -> list[Any]:
        """This process's evaluation batches of every dataset; several when a dict of datasets was given."""
        return list(self._eval_loaders.values()) or [loader for loader in [self._eval_dataloader] if loader is not None]

    @property
    def batch_indices(self) -> list[Any] | None:
        """The indices in the dataset of the samples in the current batch of this process.

        For callbacks and steps. ``None`` when they are not known: of streams, and of loaders that are no
        ``DataLoader``; empty for a batch that only keeps this process in step with the others, which counts nothing.
        """
        indices = None if self._loaded is None else self._loaded.indices
        return indices.tolist() if isinstance(indices, torch.Tensor) else None if indices is None else list(indices)

    def gather(self, tensor: Any, padding_value: float | None = None) -> Any:
        """Concatenate tensors of all processes along their first dimension. To be called on every process.

        :param tensor: a tensor, or nested lists, tuples and dicts of tensors. The first dimension may differ from
            process to process.
        :param padding_value: accepted for the ancestor's users and not needed: nothing of the padding is left
        """
        return self.ranks.gather(tensor)

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.ranks.barrier()

    def broadcast_object(self, obj: T) -> T:
        """Return what the first process gave, on every process. To be called on every process.

        :param obj: anything that can be pickled; that of the other processes is not looked at
        """
        return self.ranks.broadcast_object(lambda: obj)

    def all_gather_object(self, obj: T) -> list[T]:
        """Return what each process gave, in the order of their ranks. To be called on every process.

        :param obj: anything that can be pickled
        """
        return self.ranks.all_gather_object(obj)

    def tensor_to_numeric(self, tensor: torch.Tensor, reduce: str | None = None) -> float | int:
        """Return a tensor of one element as a Python number.

        :param tensor: of one element
        :param reduce: ``"sum"``, ``"mean"`` or ``"max"`` over all processes, which must all call it then; ``None``:
            this process's own
        """
        if reduce not in (None, "sum", "mean", "max"):
            raise ValueError(f"reduce={reduce!r} must be None, 'sum', 'mean' or 'max'.")
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
            raise ValueError(f"tensor={tensor!r} must be a tensor of one element. Reduce it first, by its mean() say.")
        values = [tensor.item()] if reduce is None else self.all_gather_object(tensor.item())
        if reduce == "max":
            return max(values)
        return sum(values) / len(values) if reduce == "mean" else sum(values)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once on every machine."""
        self.accelerator.print(*args, **kwargs)

    def close(self) -> None:
        """Free what the trainer holds; afterwards it cannot be used.

        Happens by itself at the end of the program, when the job of several processes is left in order, too. ``with
        Trainer(...) as trainer:`` does the same at the end of the block.
        """
        lifecycle.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        lifecycle.close(self)

    # --------------------------------------------------------------------------------- setting up a run

    @contextmanager
    def _prepared(self, training: bool) -> Iterator[None]:
        """Give the model and the optimizer to Accelerate, and take them back at the end, however it comes."""
        if self._preparation is not None and self._preparation.can_unwrap:  # within a run
            yield
            return
        if isinstance(self.loss_func, nn.Module):
            self.loss_func.to(self.device)
        self._apply_model_options()
        self._preparation = Preparation(self.accelerator, self.model, self.optimizer, training)
        self.model, self.optimizer = self._preparation.model, self._preparation.optimizer
        try:
            yield
        finally:
            self.model, self.optimizer = self._preparation.release(self.model)
            if self._preparation.can_unwrap:
                self._preparation = None

    def _apply_model_options(self) -> None:
        """Lay out and compile the model, in place; a model that is compiled stays as it is."""
        model = self.get_model()
        if self.channels_last:
            model.to(memory_format=torch.channels_last)
        if self.compile_model is not False and model._compiled_call_impl is None:
            model.compile(**({} if self.compile_model is True else self.compile_model))

    @contextmanager
    def _unwrapped_model(self) -> Iterator[None]:
        """Use the module inside ``DistributedDataParallel``, whose forward pass communicates.

        Ranks may then have different numbers of batches.
        """
        wrapped = self.model
        self._sync_buffers()
        if self._preparation is None or self._preparation.can_unwrap:
            self.model = unwrap(wrapped)
        try:
            yield
        finally:
            self.model = wrapped

    def _sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers, as ``DistributedDataParallel`` does before its next forward pass.

        Until then, running statistics (of batch norm, say) are those of each rank's own last batch.
        """
        if isinstance(self.model, DistributedDataParallel) and self.model.broadcast_buffers:
            self.sync_buffers(self.model)

    def sync_buffers(self, module: nn.Module) -> None:
        """Give all processes the first one's buffers of a module. To be called on every process."""
        self.ranks.copy_from_first(module.buffers())

    @property
    def is_running(self) -> bool:
        """Whether a run of training, evaluation or prediction is under way (of a model that is not sharded)."""
        return self._preparation is not None and self._preparation.can_unwrap

    @property
    def is_sharded(self) -> bool:
        """Whether the weights of the model are spread over the processes (FSDP, DeepSpeed)."""
        return self._preparation is not None and not self._preparation.can_unwrap

    def _shard(self, source: Any, training: bool) -> ShardedLoader:
        equal_steps = training or (self._preparation is not None and not self._preparation.can_unwrap)
        loader = shard(source, self.ranks, self.device, self.data_seed, equal_steps)
        loader.channels_last = self.channels_last
        loader.yields_failures = training and any(callback.skips_failed_batches for callback in self.callback_handler)
        return loader

    @property
    def _local_world_size(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.accelerator.num_processes))

    @property
    def _config(self) -> TrainerRunConfig:
        if self.run_config is None:
            raise RuntimeError("There is no run_config before train() or evaluate() was called.")
        return self.run_config

    def _create_run_config(self, batch_size: int, request: RunRequest) -> TrainerRunConfig:
        self._update_limit = request.max_num_train_steps
        return resolve_run_config(
            request,
            accelerator=self.accelerator,
            train_dataloader=self._train_dataloader,
            train_dl_kwargs=self._train_dl_kwargs,
            eval_dl_kwargs=self._eval_dl_kwargs,
            batch_size=batch_size,
            seed=self.seed,
        )
