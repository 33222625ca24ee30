"""Data and orders that differ between processes, or from the run that is resumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from itertools import chain
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from pytorch_accel_lite.data import OwnShard
from pytorch_accel_lite.extending import SHARED_DATA_CHECKS
from tests.launching import two_are_enough
from tests.own_loaders import MeanOfTargets, Seen, numbers, trained_on
from tests.ranks import OrderedStream, rank, world_size
from tests.small_models import Rows, changed_manifest, make_data, make_trainer, train
from tests.streams import SavesEachUpdate, mixed, shuffled


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
    """Draws from a generator of its own, which nothing can seed or copy.

    Args:
        size: number of indices
        seed: the seed of the generator; ``None`` for another order on each process
        is_endless: whether an epoch has no end

    Attributes:
        orders: yields the order of each epoch
    """

    def __init__(self, size: int, seed: int | None = None, is_endless: bool = False) -> None:
        self.size, self.is_endless = size, is_endless
        self.orders = self.draw(seed)

    def draw(self, seed):
        rng = np.random.default_rng(seed)
        while True:
            yield rng.permutation(self.size).tolist()

    def __iter__(self):
        while True:
            yield from next(self.orders)
            if not self.is_endless:
                return

    def __len__(self):
        if self.is_endless:
            raise TypeError("it has no end")
        return self.size


NAMES_OF_PARTS = [("num_replicas", "rank"), ("num_processes", "process_index"), ("_world_size", "_rank")]


def configured(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def distributed_samplers() -> Any:
    """The samples read when torch's sampler is nested in others, or makes its own batches."""

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


@pytest.mark.thorough
@pytest.mark.extension("streams")
@two_are_enough
@pytest.mark.processes
def test_a_nested_distributed_sampler_gives_the_complete_order(ranks):
    results = ranks(distributed_samplers)
    for name, found in results[0].items():
        of_all = [result[name][0] for result in results]
        epochs = [list(chain(*parts)) for parts in zip(*of_all, strict=True)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 2, name
        assert epochs[0] != epochs[1], name  # shuffled again
        assert found[1] == pytest.approx(7.5), name


def other_samplers_of_parts() -> Any:
    """The errors for samplers of other packages that shard by rank."""
    loaders: dict[Any, Callable[..., Any]] = {}
    for names in NAMES_OF_PARTS:
        sampler = EveryOther(names)
        batches = BatchSampler(sampler, 4, False)
        loaders[names, "sampler"] = lambda data, sampler=sampler: DataLoader(data, 4, sampler=sampler)
        loaders[names, "batches"] = lambda data, batches=batches: DataLoader(data, batch_sampler=batches)
        loaders[names, "uncollated"] = lambda data, batches=batches: DataLoader(data, batch_size=None, sampler=batches)
    return {name: trained_on(numbers(), make) for name, make in loaders.items()}


@pytest.mark.extension("streams")
@pytest.mark.processes
def test_other_samplers_that_shard_by_rank_are_refused(ranks):
    n = ranks.world_size
    for result in ranks(other_samplers_of_parts):
        for name, said in result.items():
            assert f"gives one of {n} parts of its order" in said, name
            assert "pass OwnShard(DataLoader(...))" in said, name


def checked_as_a_user_wants() -> Any:
    """The error of a check of one's own."""

    def check(dataset: Any, ranks: Any) -> None:
        if len(dataset) < 16:
            raise ValueError(f"{len(dataset)} rows are too few for {ranks.world_size} processes")

    SHARED_DATA_CHECKS.append(check)
    try:
        return trained_on(numbers(8), lambda data: DataLoader(data, 4))
    finally:
        SHARED_DATA_CHECKS.remove(check)


@pytest.mark.processes
def test_shared_data_have_further_checks(two_ranks):
    assert two_ranks(checked_as_a_user_wants) == ["8 rows are too few for 2 processes"] * 2
    assert isinstance(checked_as_a_user_wants(), tuple)  # nothing is shared


def orders_of_their_own() -> Any:
    """The errors, under a seed, for samplers with other orders on each process, and with equal orders."""
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


@pytest.mark.processes
def test_samplers_that_differ_between_processes_are_refused(ranks):
    results = ranks(orders_of_their_own)
    of_all = [result.pop("the same")[0] for result in results]
    for parts in zip(*of_all, strict=True):
        assert sorted(chain(*parts)) == list(range(16))
    for result in results:
        for name, said in result.items():
            assert "gives another order on each process, of lengths [" in said, name
            assert "set_epoch(epoch)" in said, name


def parts_by_hand() -> list[int]:
    """How many warnings there are without a seed, for samplers of all samples, of own parts and of batches of these."""
    own = SubsetRandomSampler(range(rank(), 16, world_size()))
    few = RandomSampler(numbers(), replacement=True, num_samples=2)  # which hardly ever draws the same twice
    samplers = [SubsetRandomSampler(range(16)), few, own, BatchSampler(own, 4, False)]
    counts = []
    for sampler in samplers:
        kwargs = {"batch_sampler": sampler} if isinstance(sampler, BatchSampler) else {"sampler": sampler}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained_on(numbers(), lambda data, kwargs=kwargs: DataLoader(data, **kwargs))
        told = [str(warning.message) for warning in caught]
        counts.append(sum("gives other samples on each process. Without a seed" in text for text in told))
    return counts


@pytest.mark.processes
def test_parts_divided_by_hand_without_a_seed_are_a_warning(two_ranks):
    (*whole, part, batches), others = two_ranks(parts_by_hand)
    assert whole == [0, 0]
    assert min(part, batches) >= 1
    assert others == [0, 0, 0, 0]


def configured_evenly() -> Any:
    """The samples read when settings need no change."""
    options = {"even_batches": False, "non_blocking": True, "dispatch_batches": False}
    return trained_on(numbers(15), lambda data: DataLoader(data, 4), accelerator=configured(**options))[0]


@pytest.mark.processes
def test_batches_are_even_by_default(two_ranks):
    for parts in zip(*two_ranks(configured_evenly), strict=True):
        assert sorted(chain(*parts)) == [*range(15)]


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("use_seedable_sampler", True, r"Trainer\(seed=\.\.\.\)"),
        ("data_seed", 3, r"Trainer\(seed=\.\.\.\)"),
        ("use_stateful_dataloader", True, "torchdata's StatefulDataLoader"),
        ("split_batches", True, "pass the batch size of one process"),
        ("dispatch_batches", True, "each process reads its share of data that can be indexed or divided"),
    ],
)
def test_options_of_dataloaders_without_effect_are_refused(option, value, instead):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**{option: value}))
    trainer = make_trainer((), nn.Linear(1, 1), accelerator=accelerator)
    with pytest.raises(ValueError, match=f"DataLoaderConfiguration has {option}={value}.*{instead}"):
        trainer.train(numbers(8), 1)


def own_batches() -> dict[str, tuple[Any, str]]:
    """The samples of ready batches, and the output about them."""
    batches = [(x, x.clone()) for x in numbers(8).tensors[0].split(2)]
    found = {}
    loaders = {"list": batches, "iterable": OrderedStream(batches), "own": OwnShard(batches[rank() :: world_size()])}
    for name, loader in loaders.items():
        text = StringIO()
        with redirect_stdout(text):
            epochs, _ = trained_on(numbers(8), lambda _, loader=loader: loader, num_epochs=2)
        found[name] = epochs, text.getvalue()
    return found


@pytest.mark.extension("streams")
@pytest.mark.processes
def test_own_batches_that_each_process_reads_in_full_are_named(two_ranks):
    results = two_ranks(own_batches)
    first, second = results
    assert first["list"][0] == second["list"][0] == [[*range(8)]] * 2
    for name, kind in (("list", "list"), ("iterable", "OrderedStream")):
        for data in ("training", "evaluation"):
            assert first[name][1].count(f"Each process reads all {data} batches of its own {kind}: they are not") == 1
        assert second[name][1] == ""
    assert sorted(first["own"][0][0] + second["own"][0][0]) == [*range(8)]
    assert "batches of its own" not in first["own"][1]
    assert "batches of its own" not in own_batches()["list"][1]


class SavesAll(SavesEachUpdate):
    def on_epoch_checkpoint(self, trainer, **kwargs):
        trainer.save_training_state(self.folder / f"epoch {trainer.progress.epoch}")


def seen_in_training(data: Any, callbacks: Any = (), resume_from: Any = None, **loader: Any) -> list[list[int]]:
    """The samples of each epoch, of two."""
    seen = Seen()
    trainer = make_trainer([seen, *callbacks], nn.Linear(1, 1), loss_func=MeanOfTargets(), seed=0)
    loader.setdefault("num_workers", 0)
    trainer.train(data, 2, per_device_batch_size=4, train_dataloader_kwargs=loader, resume_from=resume_from)
    return seen.epochs


def in_batches(sampler: Any) -> dict[str, Any]:
    return {"batch_sampler": BatchSampler(sampler, 4, False)}


class ByEpoch(Sampler[int]):
    """Shuffles by the epoch alone."""

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(12).tolist())

    def __len__(self):
        return 12

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.sampled
@pytest.mark.parametrize("wrap", [lambda sampler: {"sampler": sampler}, in_batches], ids=["samples", "batches"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_is_resumed_in_the_order_it_was_begun_in(tmp_path, wrap, workers):
    whole = seen_in_training(numbers(12), [SavesAll(tmp_path / "by epoch")], **wrap(ByEpoch()))
    rest = seen_in_training(numbers(12), resume_from=tmp_path / "by epoch/4", **wrap(ByEpoch()))
    assert rest == [whole[1][4:]]
    saving = SavesAll(tmp_path / "of its own")
    whole = seen_in_training(Rows(numbers(12)), [saving], **wrap(OwnGenerator(12, seed=0)))
    rest = seen_in_training(
        Rows(numbers(12)), resume_from=saving.folder / "4", num_workers=workers, **wrap(OwnGenerator(12, seed=0))
    )
    assert rest == [whole[1][4:]]
    again = OwnGenerator(12, seed=0)
    list(again)
    with pytest.warns(UserWarning, match="now gives another order for epoch 2 than when the training state was saved"):
        assert seen_in_training(numbers(12), resume_from=saving.folder / "4", **wrap(again))[0] != []


@pytest.mark.parametrize(("size", "shuffle"), [(4, True), (8, True), (20, True), (20, False)])
def test_an_epoch_is_not_resumed_over_data_of_another_length(tmp_path, size, shuffle):
    seen_in_training(numbers(12), [SavesAll(tmp_path)], shuffle=shuffle)
    with pytest.raises(ValueError, match=f"An epoch now has {size} samples, but had 12 when the training state was"):
        seen_in_training(numbers(size), resume_from=tmp_path / "2", shuffle=shuffle)
    [epoch] = seen_in_training(numbers(size), resume_from=tmp_path / "epoch 1", shuffle=shuffle)
    assert sorted(epoch) == [*range(size)]


def test_another_batch_size_does_not_change_the_resumed_order(tmp_path):
    def in_batches_of(size):
        return {"batch_sampler": BatchSampler(RandomSampler(range(13)), size, drop_last=True)}

    whole = seen_in_training(numbers(13), [SavesAll(tmp_path)], **in_batches_of(4))
    rest = seen_in_training(numbers(13), resume_from=tmp_path / "4", **in_batches_of(6))
    assert rest[0][:6] == whole[1][4:10]


class Told:
    """Records the epochs passed to ``set_epoch``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.epochs: list[int] = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Backwards(Told, SequentialSampler):
    """A subclass of torch's sampler with an order of its own, backwards in the first epoch."""

    def __iter__(self):
        return iter(range(len(self))[:: -1 if len(self.epochs) < 2 else 1])


class NotRandom(Told, RandomSampler):
    __iter__ = Backwards.__iter__


class Grouped:
    """Batches of a sampler, of no class of torch's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self):
        yield list(self.sampler)


class ToldStream(Told, IterableDataset[Any]):
    def __iter__(self):
        return iter(numbers(4))


class ToldBatches(Told):
    def __iter__(self):
        return iter(DataLoader(numbers(4), 4))


@pytest.mark.parametrize("kind", [Backwards, NotRandom])
@pytest.mark.parametrize("data", [numbers(6), Rows(numbers(6))])
@pytest.mark.parametrize("seed", [None, 3])
def test_subclasses_of_torchs_samplers_keep_their_order(kind, data, seed):
    sampler = kind(data)
    seen, _ = trained_on(data, lambda data: DataLoader(data, 4, sampler=sampler), seed=seed)
    assert seen == [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]]


@pytest.mark.extension("streams")
def test_set_epoch_counts_epochs_from_zero():
    sampler = DistributedSampler(numbers(16), 1, 0, seed=4)
    by_hand = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        by_hand.append([int(x) for batch, _ in DataLoader(numbers(16), 4, sampler=sampler) for x in batch])
    for seed in (None, 0):
        for wrap in (lambda loader: loader, OwnShard):
            fresh = DistributedSampler(numbers(16), 1, 0, seed=4)
            loader = wrap(DataLoader(numbers(16), 4, sampler=fresh))
            assert trained_on(numbers(16), lambda _, loader=loader: loader, 3, seed=seed)[0] == by_hand


@pytest.mark.parametrize(
    "kind",
    [
        *("sampler", "in a batch sampler"),
        *(pytest.param(kind, marks=pytest.mark.extension("streams")) for kind in ("stream", "batches", "own batches")),
        pytest.param("shuffled", marks=pytest.mark.extension("shuffled_streams")),
        pytest.param("mixed", marks=pytest.mark.extension("mixtures")),
    ],
)
def test_set_epoch_of_every_data_source_is_called_with_0_and_1(kind):
    told = {"batches": ToldBatches, "own batches": ToldBatches}.get(kind, ToldStream)()
    data: Any = told
    if kind in ("sampler", "in a batch sampler"):
        told, data = Backwards(numbers(4)), numbers(4)
    made = {
        "sampler": lambda: DataLoader(data, 4, sampler=told),
        "in a batch sampler": lambda: DataLoader(data, batch_sampler=Grouped(told)),
        "shuffled": lambda: DataLoader(shuffled(told), 4),
        "mixed": lambda: DataLoader(mixed({"all": told}, repeat=False), 4),
        "batches": lambda: told,
        "own batches": lambda: OwnShard(told),
    }.get(kind, lambda: DataLoader(told, 4))
    make_loader = made()
    trained_on(data, lambda _: make_loader)
    assert sorted(set(told.epochs)) == [0, 1]


class Holds(Dataset[Any]):
    """Reads a dataset that it holds somewhere."""

    def __init__(self, data: Any, holder: Any) -> None:
        self.data, self.holder = [data], holder

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> Any:
        return self.data[0][index]


@pytest.mark.parametrize("hold", [
    lambda data: [("a", data)],
    lambda data: {"n": 3, "a": data},
    lambda data: [None, data],
    lambda data: [{"a": [data]}],
])  # fmt: skip
def test_datasets_within_lists_and_dicts_are_told_the_epoch(hold):
    epochs: list[int] = []
    inner: Any = make_data(4)
    inner.set_epoch = epochs.append
    data = Holds(make_data(4), hold(inner))
    train(make_trainer(), epochs=2, train_dataset=data, train_dataloader_kwargs={"num_workers": 0})
    assert epochs == [0, 1]


class FromOne(ByEpoch):
    """Shuffles as when epochs were counted from 1."""

    def set_epoch(self, epoch):
        self.epoch = epoch + 1


def test_states_of_earlier_versions_count_epochs_from_one(tmp_path):
    whole = seen_in_training(numbers(12), [SavesAll(tmp_path)], sampler=FromOne())
    with changed_manifest(tmp_path / "4") as manifest:
        assert manifest.pop("first_epoch") == 0
    rest = seen_in_training(numbers(12), [SavesAll(tmp_path / "again")], tmp_path / "4", sampler=ByEpoch())
    assert rest == [whole[1][4:]]
    assert seen_in_training(numbers(12), resume_from=tmp_path / "again/5", sampler=ByEpoch()) == [whole[1][8:]]


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(4))], ids=["whole", "subset"])
def test_data_in_memory_are_told_the_epoch(wrap):
    epochs: list[int] = []
    data: Any = make_data(6)
    data.set_epoch = epochs.append
    train(make_trainer(), epochs=2, train_dataset=wrap(data))
    assert epochs == [0, 1]
