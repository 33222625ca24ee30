"""The loaders of a run, and what follows from them: its length and the sizes of its batches."""

from __future__ import annotations

from dataclasses import fields

from pytorch_accel_lite.data.loader_base import LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.loader_creation import LoaderKwargs, sharded_loader
from pytorch_accel_lite.data.named_datasets import NamedSampler, describe_lengths
from pytorch_accel_lite.data.sources import Source, dataset_of, find_length, is_named
from pytorch_accel_lite.run.accumulation import Accumulation
from pytorch_accel_lite.run.request_and_config import RunRequest, TrainerRunConfig
from pytorch_accel_lite.run.run import Run, TrainerLike


def set_train_loader(trainer: TrainerLike, run: Run) -> ShardedLoader:
    """Create the loader of the training batches, and return it."""
    run.data.train_loader = None  # what the method assigns to trainer.train_dataset is read
    passed = run.data.train_arguments
    source = trainer.create_train_dataloader(passed.size, passed.loader_kwargs)
    run.data.train_dataset = dataset_of(run.data.train_dataset)
    run.data.train_loader = loader = sharded_for_run(trainer, run, source, training=True)
    sampler = getattr(source, "sampler", None)
    if isinstance(sampler, NamedSampler) and (lengths := describe_lengths(sampler)):
        trainer.print(lengths)
    return loader


def set_eval_loaders(trainer: TrainerLike, run: Run) -> None:
    """Create the loaders of the evaluation dataset, or of several by name."""
    run.data.eval_loaders = {}
    dataset, passed = run.data.eval_dataset, run.data.eval_arguments
    argument = "eval_dataset" if run.kind == "training" else "dataset"
    for name, part in dataset.items() if is_named(dataset) else [("", dataset)]:
        if is_named(dataset) and not (name and isinstance(name, str)):
            raise ValueError(f"{argument} has the key {name!r}, but keys name the metrics: use non-empty strings.")
        run.data.eval_dataset, run.data.eval_loader = part, None  # overrides of create_eval_dataloader use the first
        source = trainer.create_eval_dataloader(passed.size, passed.loader_kwargs)
        run.data.eval_loader = sharded_for_run(trainer, run, source, training=False)
        check_gives_batches(run.data.eval_loader, argument)
        if name:
            run.data.eval_loaders[name] = run.data.eval_loader
    if is_named(dataset):
        run.data.eval_dataset = {name: dataset_of(part) for name, part in dataset.items()}
    else:
        run.data.eval_dataset = dataset_of(dataset)


def check_gives_batches(loader: ShardedLoader, argument: str) -> None:
    """Check that a dataset fills a batch. Those of streams are counted as they are read.

    Args:
        argument: the user's argument that has the dataset

    Raises:
        ValueError: if it gives no batch
    """
    if find_length(loader) == 0:
        raise ValueError(
            f"{argument} gives no batch: its sampler is empty, or has less than a batch for every process, while "
            "drop_last=True drops what is left. Lower the batch size, or omit drop_last."
        )


def sharded_for_run(trainer: TrainerLike, run: Run, source: Source, training: bool) -> ShardedLoader:
    """Return a loader that gives this process its share of a source of batches, with the options of the run.

    A source that is already a ``ShardedLoader`` is returned unchanged.
    """
    has_fixed_shares = trainer.division.has_fixed_shares
    takes_equal_steps = training or (not has_fixed_shares and trainer.is_sharded)
    evens_shares = has_fixed_shares and run.ranks.world_size > 1 and trainer.is_sharded
    options = LoaderOptions(
        seed=run.data.seed,
        fill=takes_equal_steps,
        limit=run.request.max_batches,
        channels_last=trainer.channels_last,
        shares=trainer.division.shares,
        evens_shares=evens_shares,
        yields_failures=run.request.skips_failed_batches if training else run.skipped is not None,
        divides=training,
        first_epoch=run.data.first_epoch,
    )
    loader = sharded_loader(source, run.data.ranks, run.device, options)
    if loader is not source:
        run.data.made_loaders.add(loader)
        data = "training" if training else "evaluation"
        if loader.shared_by:
            trainer.print(f"Each process reads its own part of the {data} data, as sharded by {loader.shared_by}.")
        elif loader.undivided:
            trainer.print(
                f"Each process reads all {data} batches of its own {loader.undivided}: they are not divided among the "
                "processes. If all have the same batches, keep a part on each, such as "
                "batches[run.ranks.rank::run.ranks.world_size], or use a Dataset. If each has its own, pass "
                "OwnShard(batches), which says so."
            )
    return loader


#: The settings of a run that are requested as they are, unlike its length.
_REQUESTED = {item.name for item in fields(RunRequest)} & {item.name for item in fields(TrainerRunConfig)}
_REQUESTED -= {"num_epochs", "max_num_train_steps"}


def create_config(trainer: TrainerLike, run: Run) -> TrainerRunConfig:
    """Return the settings of a run; from ``_create_run_config`` if it is overridden, as in pytorch-accelerated."""
    request, batch_size = run.request, run.data.eval_arguments.size  # also that of the training, if there is one
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
    for name in _REQUESTED:
        if getattr(config, name) != getattr(usual, name):
            setattr(request, name, getattr(config, name))
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
