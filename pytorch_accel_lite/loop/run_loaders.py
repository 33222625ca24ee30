"""The loaders of a run: of its training batches, and of one or several evaluation datasets."""

from __future__ import annotations

from pytorch_accel_lite.data import ShardedLoader
from pytorch_accel_lite.data.dataloader_creation import LoaderKwargs
from pytorch_accel_lite.data.loader_base import LoaderOptions
from pytorch_accel_lite.data.loader_choice import create_loader
from pytorch_accel_lite.data.named_datasets import NamedSampler, describe_lengths
from pytorch_accel_lite.data.sources import Source, dataset_of, find_length
from pytorch_accel_lite.run.run import Run, TrainerLike


def create_train_loader(
    trainer: TrainerLike, run: Run, batch_size: int, loader_kwargs: LoaderKwargs | None
) -> ShardedLoader:
    """Create the loader of the training batches, and return it."""
    run.data.train_loader = None  # what the method assigns to trainer.train_dataset is read
    source = trainer.create_train_dataloader(batch_size, loader_kwargs)
    run.data.train_dataset = dataset_of(run.data.train_dataset)
    run.data.train_loader = loader = loader_of_run(trainer, run, source, training=True)
    sampler = getattr(source, "sampler", None)
    if isinstance(sampler, NamedSampler) and (lengths := describe_lengths(sampler)):
        trainer.print(lengths)
    return loader


def create_eval_loaders(trainer: TrainerLike, run: Run, batch_size: int, loader_kwargs: LoaderKwargs | None) -> None:
    """Create the loaders of the evaluation dataset, or of several by name."""
    run.data.eval_loaders = {}
    dataset = run.data.eval_dataset
    argument = "eval_dataset" if run.kind == "training" else "dataset"
    for name, part in dataset.items() if isinstance(dataset, dict) else [("", dataset)]:
        if isinstance(dataset, dict) and not (name and isinstance(name, str)):
            raise ValueError(f"{argument} has the key {name!r}, but keys name the metrics: use non-empty strings.")
        run.data.eval_dataset, run.data.eval_loader = part, None  # overrides of create_eval_dataloader use the first
        source = trainer.create_eval_dataloader(batch_size, loader_kwargs)
        run.data.eval_loader = loader_of_run(trainer, run, source, training=False)
        check_gives_batches(run.data.eval_loader, argument)
        if name:
            run.data.eval_loaders[name] = run.data.eval_loader
    if isinstance(dataset, dict):
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
            f"{argument} gives no batch: with drop_last=True it must hold at least one batch for every process. "
            "Lower the batch size, or omit drop_last."
        )


def loader_of_run(trainer: TrainerLike, run: Run, source: Source, training: bool) -> ShardedLoader:
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
    loader = create_loader(source, run.data.ranks, run.device, options)
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
