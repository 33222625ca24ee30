"""Data that are not the same on every process, or of which samplers give each a part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import Mixture, OwnShard, ReadByAll
from tests.cases.common import rank, world_size


def numbers(size: int = 16) -> TensorDataset:
    x = torch.arange(float(size))[:, None]
    return TensorDataset(x, x.clone())


class MeanOfTargets(nn.Module):
    """A loss by which a mean shows which samples were used, each how often."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return targets.mean() + 0 * outputs.sum()


class Seen(TrainerCallback):
    """Keeps the samples of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[list[int]] = []

    def on_train_epoch_start(self, trainer, **kwargs):
        self.epochs.append([])

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        if batch_output["batch_size"]:
            self.epochs[-1] += batch[0].flatten().int().tolist()


def trained_on(data: Any, make_loader: Callable[..., Any], num_epochs: int = 2, **kwargs: Any) -> Any:
    """The samples of this process in each epoch, and the loss of an evaluation of all data; or what is said."""

    class OwnLoader(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return make_loader(self.train_dataset)

        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            return make_loader(self.eval_dataset)

    model, seen = nn.Linear(1, 1), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = OwnLoader(model, MeanOfTargets(), optimizer, callbacks=[seen], **kwargs)
    try:
        trainer.train(data, num_epochs, eval_dataset=data)
    except ValueError as error:
        return str(error)
    return seen.epochs, trainer.run_history.get_latest_metric("eval_loss_epoch")


class OwnBatches(BatchSampler):
    """A batch sampler of the user's own."""


class EveryOther(Sampler[int]):
    """Gives a part of its order, as samplers of several packages do."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names
        vars(self).update(zip(names, (world_size(), rank()), strict=True))

    def __iter__(self):
        return iter(range(rank(), 16, world_size()))

    def __len__(self):
        return len(range(rank(), 16, world_size()))


class OwnGenerator(Sampler[int]):
    """Draws from a generator of its own, which torch.manual_seed does not seed.

    :param seed: ``None`` for another order on each process
    """

    def __init__(self, size: int, seed: int | None = None, is_endless: bool = False) -> None:
        self.size, self.is_endless = size, is_endless
        self.generator_of_its_own = np.random.default_rng(seed)

    def __iter__(self):
        while True:
            yield from self.generator_of_its_own.permutation(self.size).tolist()
            if not self.is_endless:
                return

    def __len__(self):
        if self.is_endless:
            raise TypeError("it has no end")
        return self.size


class ReadsAhead(DataLoader[Any]):
    """A subclass with an ``__iter__`` of its own, as for reading in a thread."""

    def __iter__(self):
        return iter(list(super().__iter__()))


NAMES_OF_PARTS = [("num_replicas", "rank"), ("num_processes", "process_index"), ("_world_size", "_rank")]


def distributed_samplers() -> Any:
    """What is seen of all data where torch's sampler is inside others, or makes batches by itself."""

    def by_sampler(data):
        return DistributedSampler(data, world_size(), rank())

    loaders = {
        "own batches": lambda data: DataLoader(data, batch_sampler=OwnBatches(by_sampler(data), 4, False)),
        "batches without collation": lambda data: DataLoader(
            data, batch_size=None, sampler=BatchSampler(by_sampler(data), 4, False)
        ),
        "samples without collation": lambda data: DataLoader(data, batch_size=None, sampler=by_sampler(data)),
        "whole": lambda data: DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 4, False)),
    }
    return {
        (name, seed): trained_on(numbers(), make, seed=seed) for name, make in loaders.items() for seed in (None, 0)
    }


def other_samplers_of_parts() -> Any:
    """What is said of samplers of other packages that give a part each."""
    loaders: dict[Any, Callable[..., Any]] = {}
    for names in NAMES_OF_PARTS:
        sampler = EveryOther(names)
        batches = BatchSampler(sampler, 4, False)
        loaders[names, "sampler"] = lambda data, sampler=sampler: DataLoader(data, 4, sampler=sampler)
        loaders[names, "batches"] = lambda data, batches=batches: DataLoader(data, batch_sampler=batches)
        loaders[names, "uncollated"] = lambda data, batches=batches: DataLoader(data, batch_size=None, sampler=batches)
    return {name: trained_on(numbers(), make) for name, make in loaders.items()}


class Transformed(Dataset[Any]):
    """A dataset of the user's own around another."""

    def __init__(self, data: Any) -> None:
        self.parts = {"of it": data}

    def __len__(self) -> int:
        return len(self.parts["of it"])

    def __getitem__(self, index: int) -> Any:
        return self.parts["of it"][index]


def split_datasets() -> Any:
    """What is said of parts that differ between processes, and what is seen of the same part."""
    data = {}
    torch.manual_seed(rank())
    data["drawn"] = random_split(numbers(), [12, 4])[0]
    data["drawn, inside another"] = Transformed(data["drawn"])
    data["drawn, beside another"] = ConcatDataset([numbers(), data["drawn"]])
    data["by rank"] = Subset(numbers(), range(rank(), 16 - 16 % world_size(), world_size()))
    data["longer on the first"] = numbers(16 if rank() == 0 else 14)
    torch.manual_seed(0)
    data["the same"] = Transformed(random_split(numbers(), [12, 4])[0])
    return {name: trained_on(part, lambda data: DataLoader(data, 4, shuffle=True)) for name, part in data.items()}


def orders_of_their_own() -> Any:
    """What is said under a seed of samplers that draw another order on each process, and of such that draw the same."""
    samplers = {
        "each": OwnGenerator(16),
        "endless": OwnGenerator(16, is_endless=True),
        "of a subset": SubsetRandomSampler([rank(), 15]),
        "the same": OwnGenerator(16, seed=0),
    }
    loaders: dict[str, Callable[..., Any]] = {
        name: lambda data, sampler=sampler: DataLoader(data, 4, sampler=sampler) for name, sampler in samplers.items()
    }
    batches = BatchSampler(OwnGenerator(16), 4, False)
    loaders["batches"] = lambda data: DataLoader(data, batch_sampler=batches)
    return {name: trained_on(numbers(), make, seed=0) for name, make in loaders.items()}


def loaders_with_a_method_of_their_own() -> Any:
    """What is said of subclasses that read everything on each process, and what is seen of a part for each."""
    loaders: dict[str, Callable[..., Any]] = {
        "all": lambda data: ReadsAhead(data, 4, shuffle=True),
        "batches": lambda data: ReadsAhead(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False)),
        "by its sampler": lambda data: ReadsAhead(data, 4, sampler=EveryOther(NAMES_OF_PARTS[0])),
        "by its data": lambda data: ReadsAhead(Subset(data, range(rank(), 16, world_size())), 4),
        "own": lambda data: OwnShard(ReadsAhead(data, 4)),
    }
    return {name: trained_on(numbers(), make) for name, make in loaders.items()}


class InTurn(IterableDataset[Any]):
    """Rows that cannot be indexed."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def configured(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def split_batches() -> dict[str, Any]:
    """What this process sees in two epochs where batches of six are split, and what Accelerate gives it."""
    in_batches = BatchSampler(range(24), 6, False)
    loaders: dict[str, Callable[[Any], Any]] = {
        "rows": lambda data: DataLoader(data, 6),
        "batches": lambda data: DataLoader(data, batch_sampler=in_batches),
        "stream": lambda data: DataLoader(InTurn(data), 6),
        "read by all": lambda data: DataLoader(ReadByAll(InTurn(data)), 6),
    }
    found: dict[str, Any] = {}
    for name, make in loaders.items():
        prepared = configured(split_batches=True).prepare(make(numbers(24)))
        given = [x for batch, _ in prepared for x in batch.flatten().int().tolist()]
        found[name] = given, trained_on(numbers(24), make, accelerator=configured(split_batches=True))
    return found


def settings_with_split_batches() -> Any:
    """The settings of a run that is given a batch size of six, and the samples of its first step on all processes."""
    seen = Seen()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accelerator = configured(split_batches=True)
    trainer = Trainer(model, MeanOfTargets(), optimizer, callbacks=[seen], seed=0, accelerator=accelerator)
    trainer.train(numbers(12), 1, numbers(12), per_device_batch_size=6, gradient_accumulation_steps=2)
    mixture = Mixture({"a": numbers(12), "b": numbers(12)}, mix_batches=False)
    steps = trainer.progress.step
    trainer.train(mixture, 1, per_device_batch_size=6)
    return trainer.run_config, [steps, trainer.progress.step], seen.epochs


def refused_configurations() -> dict[str, Any]:
    """What is said of what cannot be obeyed, and what is seen where it can be."""
    loaders: dict[str, Callable[[Any], Any]] = {
        "uneven": lambda data: DataLoader(data, 5),
        "rows": lambda data: DataLoader(data, 4),
        "stream": lambda data: DataLoader(InTurn(data), 4),
        "stream read by all": lambda data: DataLoader(ReadByAll(InTurn(data)), 4),
        "made batches": lambda data: DataLoader(InTurn([numbers(4)[:]] * 4), batch_size=None),
    }

    def found(name: str, size: int = 16, **options: Any) -> Any:
        return trained_on(numbers(size), loaders[name], accelerator=configured(**options))

    return {
        "uneven": found("uneven", split_batches=True),
        "made batches": found("made batches", split_batches=True),
        "rows dispatched": found("rows", dispatch_batches=True),
        "stream not dispatched": found("stream", dispatch_batches=False),
        "stream dispatched": found("stream", dispatch_batches=True),
        "stream read by all": found("stream read by all", dispatch_batches=False),
        "rows not dispatched": found("rows", dispatch_batches=False),
        "uneven shares": found("rows", size=15, even_batches=False, non_blocking=True),
    }


def own_batches() -> dict[str, tuple[Any, str]]:
    """What is seen of ready batches, and what is printed about them."""
    batches = [(x, x.clone()) for x in numbers(8).tensors[0].split(2)]
    found = {}
    loaders = {"list": batches, "iterable": InTurn(batches), "own": OwnShard(batches[rank() :: world_size()])}
    for name, loader in loaders.items():
        text = StringIO()
        with redirect_stdout(text):
            epochs, _ = trained_on(numbers(8), lambda _, loader=loader: loader, num_epochs=2)
        found[name] = epochs, text.getvalue()
    return found
