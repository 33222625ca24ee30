"""The settings of a run, resolved from its request, its data and its processes: its length, sizes of batches."""

from __future__ import annotations

from dataclasses import fields

from pytorch_accel_lite.data import ShardedLoader
from pytorch_accel_lite.data.dataloader_creation import LoaderKwargs
from pytorch_accel_lite.data.sources import find_length
from pytorch_accel_lite.run.request_and_config import RunRequest, TrainerRunConfig
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.run_parts.accumulation import Accumulation


def create_config(trainer: TrainerLike, run: Run, batch_size: int) -> TrainerRunConfig:
    """Return the settings of a run; from ``_create_run_config`` if it is overridden, as in pytorch-accelerated."""
    request = run.request
    usual = resolve_run_config(trainer, run, request, batch_size)
    if "_create_run_config" not in run.overridden:
        return usual
    config = trainer._create_run_config(
        per_device_batch_size=batch_size,
        num_epochs=request.num_epochs,
        gradient_accumulation_steps=request.gradient_accumulation_steps,
        max_num_train_steps=request.max_num_train_steps,
        gradient_clip_value=request.gradient_clip_value,
    )
    # What the method has changed is requested of the run: its settings are read in both places.
    request.gradient_accumulation_steps = config.gradient_accumulation_steps
    request.gradient_clip_value = config.gradient_clip_value
    if config.max_num_train_steps != usual.max_num_train_steps:
        request.num_epochs, request.max_num_train_steps = config.num_epochs, None
        if config.max_num_train_steps != resolve_run_config(trainer, run, request, batch_size).max_num_train_steps:
            request.max_num_train_steps = config.max_num_train_steps  # not what follows from the number of epochs
    return config


def resolve_run_config(trainer: TrainerLike, run: Run, request: RunRequest, batch_size: int) -> TrainerRunConfig:
    """Derive the settings of a run from its request and the length of its data."""
    accelerator, data = trainer.accelerator, run.data
    shares = trainer.division.count
    processes = shares or data.ranks.world_size
    train_batch_size = _batch_size_of(data.train_loader, data.train_loader_kwargs, processes) or batch_size
    eval_batch_size = _batch_size_of(data.eval_loader, data.eval_loader_kwargs, processes) or batch_size
    steps = find_length(data.train_loader)
    accumulation = Accumulation(request.gradient_accumulation_steps)
    is_evaluation = data.train_loader is None
    updates_per_epoch = 0 if is_evaluation else None if steps is None else accumulation.updates_after(steps)
    updates, epochs = request.max_num_train_steps, request.num_epochs
    if updates is not None:  # takes precedence
        epochs = None if steps is None else accumulation.epochs_for(updates, steps)
    elif steps is not None and epochs is not None:
        updates = accumulation.updates_in(epochs, steps)
    settings = {of.name: getattr(request, of.name) for of in fields(TrainerRunConfig) if hasattr(request, of.name)}
    return TrainerRunConfig(
        **settings | {"num_epochs": epochs, "max_num_train_steps": updates},
        train_per_device_batch_size=train_batch_size,
        train_dl_kwargs=data.train_loader_kwargs,
        eval_per_device_batch_size=eval_batch_size,
        eval_dl_kwargs=data.eval_loader_kwargs,
        train_total_batch_size=train_batch_size * processes * accumulation.window_size_after(0),
        eval_total_batch_size=eval_batch_size * processes,
        num_update_steps_per_epoch=updates_per_epoch,
        is_local_process_zero=accelerator.is_local_main_process,
        is_world_process_zero=accelerator.is_main_process,
        is_distributed=accelerator.num_processes > 1,
        mixed_precision=accelerator.mixed_precision,
        num_processes=accelerator.num_processes,
        seed=trainer.seed,
        logical_processes=shares,
        deterministic=trainer.deterministic,
    )


def _batch_size_of(loader: ShardedLoader | None, kwargs: LoaderKwargs | None, processes: int) -> int | None:
    """Return the number of samples in a full batch of one process, or of a share; ``None`` if unknown."""
    total = None if loader is None else loader.total_batch_size
    return (kwargs or {}).get("batch_size") if total is None else total // processes
