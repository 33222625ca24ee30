"""Setting up a training run: its data, its prepared model and its starting point."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.callback_checks import warn_of_unknown_events
from pytorch_accel_lite.base.events import EVENTS
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.randomness import capture_generators, restore_generators, seed_run
from pytorch_accel_lite.base.run_settings import RunRequest, TrainerRunConfig
from pytorch_accel_lite.checkpoint.trainer_state import check_history, find_state, warn_of_project_configuration
from pytorch_accel_lite.engine import resuming
from pytorch_accel_lite.engine.arguments import check_optimizers, check_resume, check_same_on_all_ranks, check_training
from pytorch_accel_lite.engine.evaluation import create_eval_loaders
from pytorch_accel_lite.engine.history import InMemoryRunHistory
from pytorch_accel_lite.engine.lifecycle import apply_model_options, create_config, create_loader, prepare_model
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.engine.scheduling import check_length
from pytorch_accel_lite.optimizers.gradients import GradientWindow
from pytorch_accel_lite.optimizers.operations import clear_gradients, is_made

if TYPE_CHECKING:
    from pytorch_accel_lite.base.backends import BackendSettings
    from pytorch_accel_lite.distributed import Ranks


def find_data(
    trainer: TrainerLike,
    run: Run,
    batch_size: int,
    train_loader_kwargs: dict[str, Any] | None,
    eval_loader_kwargs: dict[str, Any] | None,
    resume_from: str | os.PathLike[str] | None,
) -> None:
    """Find the state to resume from, seed the generators, and create the loaders, whose order may depend on it."""
    request = run.request
    check_resume(resume_from)
    warn_of_unknown_events(trainer, EVENTS)
    trainer.callback_handler.configure_run(trainer, request)
    check_training(trainer.optimizer, trainer.accelerator, request, trainer.create_scheduler_fn)  # with their changes
    _check_metrics(trainer, run)
    if request.saves_training_states or resume_from is not None:
        check_history(trainer.run_history)
        warn_of_project_configuration(trainer.accelerator)
    state = None
    if resume_from is not None:
        run.resumed = state = find_state(trainer, request.state_sources, resume_from)
    run.data.seed = trainer.seed
    if trainer.seed is not None:
        seed_run(trainer.seed, alike=trainer.logical is not None)
    if state is not None:
        run.data.seed = state.metadata["data_seed"]
        run.data.first_epoch = state.metadata.get("first_epoch", 1)
    elif trainer.seed is None and (request.saves_training_states or run.data.ranks.replicas > 1):
        run.data.seed = trainer.ranks.broadcast_object(lambda: int(torch.randint(2**62, ()).item()))
    if run.data.ranks.replicas > 1:  # processes that compute a batch together drop out the same units
        restore_generators(run.data.ranks.alike(capture_generators()))  # type: ignore[attr-defined]
    create_train_loader(trainer, run, batch_size, train_loader_kwargs)
    if run.data.eval_dataset is not None:
        create_eval_loaders(trainer, run, batch_size, eval_loader_kwargs)
    apply_model_options(trainer)  # before the event, so that copies made by callbacks have them too
    # A request to end the run waits until the run has started, as there is nothing yet that could end in order.
    trainer.callback_handler.call_each("on_dataloaders_created", run.control.request, trainer)


def _check_metrics(trainer: TrainerLike, run: Run) -> None:
    """Check, as far as can be known now, that the run records the metrics being watched."""
    request = run.request
    if request.scheduler_metric is not None:
        request.metrics.require(f"scheduler_metric={request.scheduler_metric!r}", request.scheduler_metric)
    request.metrics.settle(trainer)
    if isinstance(trainer.run_history, InMemoryRunHistory):
        trainer.run_history.directions = request.metrics.directions
    if request.sanity_eval_batches and run.data.eval_dataset is None:
        raise ValueError(
            f"sanity_eval_batches={request.sanity_eval_batches} needs an eval_dataset. Pass one to train()."
        )


def create_train_loader(trainer: TrainerLike, run: Run, batch_size: int, loader_kwargs: dict[str, Any] | None) -> None:
    """Create the loader of the training batches."""
    source = trainer.create_train_dataloader(batch_size, loader_kwargs)
    run.data.train_loader = create_loader(trainer, run, source, training=True)


def begin_training(trainer: TrainerLike, run: Run, batch_size: int) -> None:
    """Prepare the model and the optimizer, and set up the accumulation window."""
    request = run.request
    ranks = trainer.ranks
    had_optimizer = is_made(trainer.optimizer)
    prepare_model(trainer, training=True)
    if not had_optimizer:
        check_training(trainer.optimizer, trainer.accelerator, request, trainer.create_scheduler_fn)
        check_optimizers(trainer)
    run.config = create_config(trainer, run, batch_size)
    check_same_on_all_ranks(run.config.to_dict(), ranks)
    run.window = GradientWindow(
        run.data.ranks, trainer.device, request.gradient_accumulation_steps, run.config.train_per_device_batch_size
    )
    clear_gradients(trainer.optimizer)  # a run that failed within a window may have left some
    trainer.accelerator.sync_gradients = True
    run.step = trainer._create_step(run)


def start_or_resume(trainer: TrainerLike, run: Run, reset_run_history: bool) -> None:
    """Start from the beginning or from a training state."""
    was_mid_epoch = run.before is not None and run.before.progress.is_mid_epoch
    run.before = None  # frees the previous run and its data
    if reset_run_history:
        trainer.run_history.reset()
    elif was_mid_epoch:
        trainer.run_history._increment_epoch()
    state = run.resumed
    if state is not None:
        resuming.warn_of_other_schedule(trainer, state)
        run.schedule.is_recreated = resuming.schedule_was_for_others(trainer, run, state)
        trainer.load_training_state(state.directory)
        resuming.align_windows(run, state)
    if trainer.scheduler is not None:
        check_length(trainer, run)
    if state is not None and run.schedule.is_recreated:
        resuming.resume_schedule(trainer, run, state)
    run.step.must_compare_replicas = trainer.check_replicas and trainer.ranks.world_size > 1
    reorders = isinstance(trainer.model, DistributedDataParallel) and trainer.ranks.world_size > 2
    run.step.must_warm_up_ddp = reorders and not run.window.is_guarded and run.progress.update > 0


def resolve_run_config(
    request: RunRequest,
    accelerator: Accelerator,
    data_ranks: Ranks,
    train_dataloader: Any,
    train_dl_kwargs: dict[str, Any] | None,
    eval_dl_kwargs: dict[str, Any] | None,
    batch_size: int,
    seed: int | None,
    logical_processes: int | None,
    backends: BackendSettings,
) -> TrainerRunConfig:
    """Derive the settings of a run from the request and the length of its data.

    :param data_ranks: the processes as the data are divided among them
    :raises ValueError: if the training data do not fill a single batch
    """
    steps = find_length(train_dataloader)
    if steps == 0:
        raise ValueError(
            "train_dataset gives no batch: with drop_last=True it must hold at least per_device_batch_size samples for "
            "every process. Lower per_device_batch_size, or omit drop_last."
        )
    updates_per_epoch = None if steps is None else math.ceil(steps / request.gradient_accumulation_steps)
    request = _limit(request, updates_per_epoch)
    processes = logical_processes or data_ranks.world_size
    sharers = processes if accelerator.split_batches else 1
    train_batch_size = max(((train_dl_kwargs or {}).get("batch_size") or batch_size) // sharers, 1)
    eval_batch_size = max(((eval_dl_kwargs or {}).get("batch_size") or batch_size) // sharers, 1)
    requested = {name: value for name, value in vars(request).items() if name in TrainerRunConfig.__dataclass_fields__}
    return TrainerRunConfig(
        **requested,
        train_per_device_batch_size=train_batch_size,
        train_dl_kwargs=train_dl_kwargs,
        eval_per_device_batch_size=eval_batch_size,
        eval_dl_kwargs=eval_dl_kwargs,
        train_total_batch_size=train_batch_size * processes * request.gradient_accumulation_steps,
        eval_total_batch_size=eval_batch_size * processes,
        num_update_steps_per_epoch=updates_per_epoch,
        num_local_update_steps_per_epoch=updates_per_epoch,
        is_local_process_zero=accelerator.is_local_main_process,
        is_world_process_zero=accelerator.is_main_process,
        is_distributed=accelerator.num_processes > 1,
        mixed_precision=accelerator.mixed_precision,
        num_processes=accelerator.num_processes,
        seed=seed,
        logical_processes=logical_processes,
        **vars(backends),
    )


def _limit(request: RunRequest, updates_per_epoch: int | None) -> RunRequest:
    """Derive epochs from updates, or updates from epochs; updates take precedence."""
    if request.max_num_train_steps is not None:
        epochs = None if updates_per_epoch is None else math.ceil(request.max_num_train_steps / updates_per_epoch)
        return replace(request, num_epochs=epochs)
    if updates_per_epoch is None or request.num_epochs is None:
        return request
    return replace(request, max_num_train_steps=request.num_epochs * updates_per_epoch)
