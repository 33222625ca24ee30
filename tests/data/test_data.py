"""Reading data: every sample once, from any position, on any number of processes, from any source."""

from __future__ import annotations

import copy
import gc
import os
import random
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues, callbacks
from pytorch_accel_lite.callbacks import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    ProgressBarCallback,
    StepBasedEvaluationCallback,
)
from pytorch_accel_lite.data import NamedDatasets, OwnShard, shard
from pytorch_accel_lite.data.defaults import default_num_workers
from pytorch_accel_lite.data.reading import tensors_in_memory
from pytorch_accel_lite.data.shares import count_global_batches, global_batches, share_bounds
from pytorch_accel_lite.utils import LimitBatches
from tests.launching import run_code, some_of, two_are_enough
from tests.loaders import numbers, rank_of, samples
from tests.ranks import OrderedStream, Recorder, global_batch, shared_folder
from tests.ranks import rank as own_rank
from tests.ranks import world_size as job_size
from tests.small_models import (
    Rows,
    Stream,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    listener,
    make_data,
    make_trainer,
    train,
    weights,
)
from tests.streams import LengthBuckets, SavesEachUpdate, ShuffledSamples


class NoisyRows(Rows):
    """Augmentation with all three generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(5) + np.random.randn() + random.random(), y


class OwnOfSix(Trainer):
    """Six batches of each process."""

    samples = 2

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        mine = [tensor[own_rank() :: job_size()].split(self.samples) for tensor in self.train_dataset.tensors]
        return list(zip(*mine, strict=True))


class OwnOfLarger(OwnOfSix):
    samples = 3


class OwnOfOne(OwnOfSix):
    """Batches of the first process alone."""

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return [] if own_rank() else super().create_train_dataloader(batch_size, train_dl_kwargs)


class OrderWithoutEnd:
    """Draws from a generator that differs from rank to rank."""

    def __iter__(self):
        while True:
            yield random.randrange(50)


sizes = st.integers(1, 60)
batches = st.integers(1, 8)
processes = st.integers(1, 5)


def read(
    size: int,
    batch: int,
    world_size: int,
    start: int = 0,
    epoch: int = 1,
    training: bool = True,
    min_share: int = 1,
    **kwargs: Any,
) -> list[list[Any]]:
    """The batches of all ranks, by step."""

    def make_source(rank: int) -> Any:
        return DataLoader(numbers(size), batch, shuffle=training, **kwargs)

    return read_from(make_source, world_size, start, epoch, training, min_share)


def read_from(
    make_source: Callable[[int], Any],
    world_size: int,
    start: int = 0,
    epoch: int = 1,
    training: bool = True,
    min_share: int = 1,
) -> list[list[Any]]:
    by_rank = []
    for rank in range(world_size):
        loader = shard(make_source(rank), rank_of(rank, world_size), torch.device("cpu"), seed=3, training=training)
        by_rank.append(list(loader.steps(epoch, start, min_share=min_share)))
    assert not training or len({len(steps) for steps in by_rank}) == 1
    longest = max(map(len, by_rank))
    return [[steps[i] for steps in by_rank if i < len(steps)] for i in range(longest)]


@given(sizes, processes)
def test_shares_are_even_and_contiguous(size, world_size):
    parts = [share_bounds(size, rank, world_size) for rank in range(world_size)]
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1


@given(sizes, batches, st.integers(0, 60), st.booleans(), processes)
def test_global_batches_cover_the_rest_of_an_epoch(size, batch, start, drop_last, at_least):
    bounds = list(global_batches(size, batch * at_least, start, drop_last, at_least))
    covered = [i for begin, end in bounds for i in range(begin, end)]
    assert covered == list(range(start, start + len(covered)))
    assert all(0 < end - begin <= batch * at_least for begin, end in bounds)
    rest = max(size - start, 0)
    assert len(bounds) == count_global_batches(rest, batch * at_least, drop_last)
    assert len(covered) == (rest // (batch * at_least) * batch * at_least if drop_last else rest)


@settings(max_examples=40)
@given(sizes, batches, processes, st.integers(1, 5))
def test_an_epoch_gives_every_sample_once_with_equal_updates(size, batch, world_size, accumulation):
    steps = read(size, batch, world_size)
    for rank in range(world_size):
        ends = [step[rank].is_last or (i + 1) % accumulation == 0 for i, step in enumerate(steps)]
        assert sum(ends) == -(-len(steps) // accumulation)
    assert Counter(sample for step in steps for sample in samples(step)) == Counter(range(size))
    for step in steps:
        assert len(step) == world_size
        assert {loaded.total_samples for loaded in step} == {sum(loaded.num_samples for loaded in step)}
        counts = [loaded.num_samples for loaded in step]
        assert max(counts) - min(counts) <= 1
        assert max(counts) <= batch
    assert [step[0].is_last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps) == count_global_batches(size, batch * world_size)


@settings(max_examples=40)
@given(sizes, batches, processes, batches, processes, st.data())
def test_an_epoch_can_continue_anywhere_with_other_sizes(size, batch, world_size, batch2, world2, data):
    whole = read(size, batch, world_size)
    done = data.draw(st.integers(0, len(whole)))
    before = [sample for step in whole[:done] for sample in samples(step)]
    rest = read(size, batch2, world2, start=len(before))
    after = [sample for step in rest for sample in samples(step)]
    assert Counter(before + after) == Counter(range(size))


@settings(max_examples=60)
@given(sizes, batches, processes, batches, processes, st.data())
def test_redividing_for_batch_norm_keeps_samples_in_their_steps(size, batch, world_size, batch2, world2, data):
    whole = read(size, batch, world_size)
    shared = read(size, batch, world_size, min_share=2)
    assert [samples(step) for step in shared] == [samples(step) for step in whole]
    for step in shared:
        counts = [loaded.num_samples for loaded in step]
        assert {loaded.total_samples for loaded in step} == {sum(counts)}
        assert max(counts) <= max(batch, 3)
        if batch > 1 and sum(counts) > 1:
            assert 1 not in counts
            assert min(len(loaded.data[0]) for loaded in step) > 1  # also of those that count nothing
    done = data.draw(st.integers(0, len(shared)))
    before = [sample for step in shared[:done] for sample in samples(step)]
    after = [sample for step in read(size, batch2, world2, len(before), min_share=2) for sample in samples(step)]
    assert before + after == [sample for step in whole for sample in samples(step)]


@settings(max_examples=30)
@given(sizes, st.integers(1, 3), st.integers(1, 3))
def test_a_global_batch_is_the_same_on_any_number_of_processes(size, batch, factor):
    alone = read(size, batch * 6, 1)
    for world_size in (2, 3, 6):
        shared = read(size, batch * 6 // world_size, world_size)
        assert [samples(step) for step in shared] == [samples(step) for step in alone]


@settings(max_examples=40)
@given(sizes, batches, processes)
def test_evaluation_is_in_order_and_keeps_ranks_busy(size, batch, world_size):
    steps = read(size, batch, world_size, training=False)
    assert [sample for step in steps for sample in samples(step)] == list(range(size))
    if size >= world_size and batch > 1:
        assert all(len(step) == world_size for step in steps)


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_drop_last_drops_the_last_smaller_step_of_the_whole_job(batch):
    for world_size in (1, 2, 3):
        steps = read(23, batch, world_size, drop_last=True)
        assert all(len(samples(step)) == batch * world_size for step in steps)
        assert len(steps) == 23 // (batch * world_size)


def batch_sampler() -> Any:
    recorder, model = Recorder(), float64_model()
    trainer = adamw_trainer(model, callbacks=[recorder])
    trainer.train(
        float64_data(11), 2, per_device_batch_size=2, train_dataloader_kwargs={"batch_sampler": LengthBuckets()}
    )
    return {"sizes": recorder.counts, "samples": trainer.progress.samples, "updates": trainer.progress.update}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_distributed_sampler_is_not_divided_twice(training, batched, drop_last):
    def source(rank):
        sampler = DistributedSampler(numbers(23), num_replicas=2, rank=rank, drop_last=drop_last)
        if batched:
            return DataLoader(numbers(23), batch_sampler=BatchSampler(sampler, 4, False))
        return DataLoader(numbers(23), 4, sampler=sampler)

    first, second = (
        [i for step in read_from(source, 2, 0, epoch, training) for i in samples(step)] for epoch in (1, 2)
    )
    assert len(first) == len(set(first)) == (22 if drop_last else 23)
    assert first != second
    steps = len(shard(source(0), rank_of(0, 2), torch.device("cpu"), seed=3, training=training))
    assert steps == len(read_from(source, 2, 0, 1, training)) == 3


def test_epochs_differ_and_follow_from_the_seed():
    first, second, again = ([samples(step) for step in read(20, 4, 1, epoch=epoch)] for epoch in (1, 2, 1))
    assert first != second
    assert first == again


def test_skipped_samples_are_not_read():
    read_indices = []

    class Watched(Rows):
        def __getitem__(self, index):
            read_indices.append(index)
            return super().__getitem__(index)

    source = DataLoader(Watched(float64_data(20)), 4, shuffle=True)
    loader = shard(source, rank_of(0, 1), torch.device("cpu"), seed=1, training=True)
    list(loader.steps(1, start=16))
    assert len(read_indices) == 4


class Noisy(Rows):
    """A draw from each generator; reading a sample twice gives different noise unless it is seeded."""

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        return x, torch.rand(1), np.random.rand(), random.random()


def noisy_batches(
    workers: int, seed: int | None, start: int = 0, world_size: int = 1, data: Noisy | None = None, **kwargs: Any
) -> list[Any]:
    by_rank = []
    for rank in range(world_size):
        source = DataLoader(
            Noisy(float64_data(18)) if data is None else data,
            6 // world_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            **kwargs,
        )
        loader = shard(source, rank_of(rank, world_size), torch.device("cpu"), seed, training=True)
        list(loader.steps(1))  # workers of the epoch before are used again
        by_rank.append([loaded.data for loaded in loader.steps(2, start)])
    return [
        torch.cat([torch.cat([t.double().reshape(len(t), -1) for t in b], 1) for b in step])
        for step in zip(*by_rank, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_random_transforms_follow_seed_epoch_and_position():
    expected = noisy_batches(0, seed=1)
    assert len({value.item() for value in torch.cat(expected)[:, 5]}) == 18
    for workers, world_size in [(1, 1), (4, 1), (0, 2), (2, 2), (0, 3)]:
        found = noisy_batches(workers, seed=1, world_size=world_size)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    resumed = noisy_batches(2, seed=1, start=6)
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected[1:], strict=True))
    assert not torch.equal(noisy_batches(0, seed=2)[0][:, 5:], expected[0][:, 5:])


class Rarely(Noisy):
    """Draws from the generators of python and numpy for one sample only."""

    def __init__(self, chosen: int) -> None:
        super().__init__(float64_data(18))
        self.chosen = chosen
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index) if index == self.chosen else (self.data[index][0], torch.rand(1), 0.0, 0.0)


def test_a_dataset_that_draws_rarely_draws_the_same_numbers():
    always = torch.cat(noisy_batches(0, seed=1))
    again = 0
    for chosen in range(18):
        data = Rarely(chosen)
        found = torch.cat(noisy_batches(0, seed=1, data=data))
        draws = (always[:, :5] == data.data[chosen][0]).all(1)
        assert torch.equal(found[draws], always[draws])
        assert torch.equal(found[:, :6], always[:, :6])
        assert not found[~draws, 6:].any()
        again += (data.reads - 2 * 18) // 6
    assert 0 < again < 18  # it was noticed while a first batch was watched, or later, when one batch was read again
    assert torch.equal(torch.cat(noisy_batches(2, seed=1, data=data)), found)


class Restores(Rarely):
    """Restores the states of the generators after its draws."""

    def __getitem__(self, index):
        if index < self.chosen:
            return self.data[index][0], torch.rand(1)
        python, numpy = random.getstate(), np.random.get_state()
        drawn = random.random(), np.random.rand()
        random.setstate(python)
        np.random.set_state(numpy)
        return self.data[index][0], torch.tensor([sum(drawn)])


class AsksTorch(Rarely):
    """Depends on torch's generator without leaving a trace."""

    def __init__(self, chosen: int, ask: str) -> None:
        super().__init__(chosen)
        self.ask = ask

    def __getitem__(self, index):
        if index < self.chosen:
            return self.data[index][0], torch.tensor([0.0])
        if self.ask == "seed":
            return self.data[index][0], torch.tensor([float(torch.initial_seed() % 9973)])
        with torch.random.fork_rng():
            return self.data[index][0], torch.rand(1)


@pytest.mark.parametrize("make", [Restores, partial(AsksTorch, ask="seed"), partial(AsksTorch, ask="fork")])
@pytest.mark.parametrize("chosen", [0, 12])  # all samples do, or few
def test_draws_are_noticed_even_if_generators_are_restored(make, chosen):
    read = random.getstate, np.random.get_state, torch.initial_seed, torch.get_rng_state
    expected = torch.cat(noisy_batches(0, seed=1, data=make(chosen)))
    drawn = 18 if chosen == 0 or make is Restores else 7
    assert len({value.item() for value in expected[:, 5]}) == drawn
    for workers, world_size in [(2, 1), (0, 2)]:
        assert torch.equal(torch.cat(noisy_batches(workers, 1, 0, world_size, make(chosen))), expected)
    assert (random.getstate, np.random.get_state, torch.initial_seed, torch.get_rng_state) == read


def test_random_numbers_of_an_error_follow_from_the_seed():
    class Fails(Rows):
        def __getitem__(self, index):
            if index == 13:
                raise OSError(random.random(), np.random.rand())
            return super().__getitem__(index)

    raised = []
    for start in (0, 12):  # the batch comes after others that drew nothing, or is the first
        source = DataLoader(Fails(float64_data(16)), 4)
        loader = shard(source, rank_of(0, 1), torch.device("cpu"), seed=1, training=True)
        with pytest.raises(OSError) as caught:  # noqa: PT011
            list(loader.steps(1, start))
        raised.append(caught.value.args)
    assert raised[0] == raised[1]


class CollatesRarely:
    """Draws from the generators while collating the batch that has a chosen sample, and notes how often it is called.

    Args:
        chosen: the value of the chosen sample
        draw: returns what is drawn

    Attributes:
        calls: number of batches collated so far
    """

    def __init__(self, chosen: float, draw: Any) -> None:
        self.chosen, self.draw = chosen, draw
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        rows = torch.stack([x for x, _ in samples])
        drawn = self.draw() if self.chosen in rows[:, 0] else (0.0, 0.0, 0.0)
        return torch.cat([rows, torch.tensor([drawn] * len(rows))], 1)


def one_of_each() -> tuple[float, ...]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def asked_for() -> tuple[float, ...]:
    with torch.random.fork_rng():
        drawn = torch.rand(()).item()
    return drawn, float(torch.initial_seed() % 9973), random.Random(str(random.getstate())).random()


@pytest.mark.parametrize("draw", [one_of_each, asked_for])
def test_collating_in_a_single_batch_draws_from_its_last_sample(draw):
    def collated(start: int, workers: int = 0) -> list[torch.Tensor]:
        collate = CollatesRarely(rows[13].item(), draw)
        source = DataLoader(Rows(data), 4, num_workers=workers, collate_fn=collate)
        loader = shard(source, rank_of(0, 1), torch.device("cpu"), seed=1, training=True)
        found = [loaded.data for loaded in loader.steps(1, start)]
        assert workers or collate.calls == len(found) + (start == 0)  # noticed in a later batch, which is read again
        return found

    data = float64_data(16)
    rows = data.tensors[0][:, 0]
    before = torch.get_rng_state()
    expected = collated(12)[0]  # the first batch, whose samples have their own seeds
    assert torch.equal(torch.get_rng_state(), before)
    assert len(expected[0, -3:].unique()) == 3
    for start, workers in [(0, 0), (8, 2)]:
        assert torch.equal(collated(start, workers)[-1], expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_collating_draws_the_same_from_any_starting_point(workers):
    found = []
    for start in (0, 4, 12):
        source = DataLoader(
            Rows(float64_data(16)),
            4,
            num_workers=workers,
            collate_fn=lambda samples: torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]),
        )
        loader = shard(source, rank_of(0, 1), torch.device("cpu"), seed=1, training=True)
        found.append([loaded.data for loaded in loader.steps(1, start)])
    assert torch.equal(torch.stack(found[0][1:]), torch.stack(found[1]))
    assert torch.equal(torch.stack(found[0][3:]), torch.stack(found[2]))
    assert len(torch.stack(found[0]).unique()) == 12


class Jitter:
    """A transform whose generators are its own, as those of albumentations and MONAI are."""

    of_all = np.random.RandomState()

    def __init__(self) -> None:
        self.numpy, self.python, self.torch = np.random.default_rng(), random.Random(), torch.Generator()
        self.torch.seed()

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        drawn = self.of_all.rand(), self.numpy.random(), self.python.random(), torch.rand((), generator=self.torch)
        return torch.cat([sample, torch.tensor([float(number) for number in drawn])])


class Jittered(Rows):
    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.transforms = {"train": [Jitter(), Jitter()]}

    def __getitem__(self, index):
        sample = super().__getitem__(index)[0]
        for transform in self.transforms["train"]:
            sample = transform(sample)
        return sample


def test_generators_inside_transforms_are_seeded_by_sample():
    def read(epoch: int, start: int = 0, workers: int = 0) -> torch.Tensor:
        source = DataLoader(Jittered(float64_data(16)), 4, num_workers=workers)
        loader = shard(source, rank_of(0, 1), torch.device("cpu"), seed=1, training=True)
        return torch.cat([loaded.data for loaded in loader.steps(epoch, start)])

    first = read(1)
    assert torch.equal(read(1, workers=2), first)
    assert torch.equal(read(1, start=8), first[8:])
    drawn = torch.cat([first[:, -8:], read(2)[:, -8:]])
    assert len(drawn.unique()) == drawn.numel()


def test_seeded_reading_leaves_the_generators_unchanged():
    found = []
    for start, workers in ((4, 0), (4, 2), (5, 0)):
        torch.manual_seed(4)
        np.random.seed(start)
        random.seed(start)
        noisy_batches(workers, seed=1)
        found.append((torch.rand(1), np.random.rand(), random.random()))
    assert found[0] == found[1] == found[2]
    torch.manual_seed(4)
    assert found[0][0] == torch.rand(1)  # that of torch goes on, as without a seed


def test_randomness_in_the_collate_function_follows_the_seed():
    def collate(samples):
        return torch.stack([sample[0] for sample in samples]) + torch.rand(1), torch.rand(1)

    found = [
        [loaded.data[1] for loaded in loader.steps(1)]
        for workers in (0, 2)
        for loader in [
            shard(
                DataLoader(Rows(float64_data(8)), 4, num_workers=workers, collate_fn=collate),
                rank_of(0, 1),
                torch.device("cpu"),
                seed=1,
                training=True,
            )
        ]
    ]
    assert found[0] == found[1]


class Batched(Rows):
    """Reads many samples at once."""

    calls = 0

    def __getitem__(self, index):
        raise AssertionError("one at a time")

    def __getitems__(self, indices):
        self.calls += 1
        return [self.data[index] for index in indices]


@pytest.mark.parametrize("seed", [None, 1])
def test_datasets_with_getitems_are_read_batch_by_batch(seed):
    data, model, plain = Batched(float64_data(20)), float64_model(), float64_model()
    trainer = adamw_trainer(model, seed=seed)
    trainer.train(data, 2, per_device_batch_size=4)
    assert data.calls == 10
    if seed is not None:
        adamw_trainer(plain, seed=seed).train(float64_data(20), 2, per_device_batch_size=4)
        assert equal_weights(model.state_dict(), plain.state_dict())


WRAPPED = {
    "subset": lambda data: Subset(data, range(12)),
    "nested": lambda data: random_split(Subset(data, range(12)), [12, 0])[0],
    "stacked": lambda data: StackDataset(data, data),
    "concatenated": lambda data: ConcatDataset([data]),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_torchs_wrappers_change_nothing_of_how_data_is_read(wrap):
    data = wrap(Noisy(float64_data(12)))
    assert default_num_workers(data, 1) == default_num_workers(Noisy(float64_data(12)), 1)
    assert default_num_workers(wrap(float64_data(12)), 1) == 0

    def noise(batch_size):
        source = DataLoader(data, batch_size)
        batches = list(shard(source, rank_of(0, 1), torch.device("cpu"), seed=1, training=True))
        return torch.cat(
            [batch[1] if len(batch) == 4 else torch.cat([part[1] for part in batch], 1) for batch in batches]
        )

    assert torch.equal(noise(4), noise(3))


@pytest.mark.parametrize("wrap", [WRAPPED["subset"], WRAPPED["nested"], WRAPPED["stacked"]])
def test_batched_reading_reaches_through_torchs_wrappers(wrap):
    batched = Batched(float64_data(12))
    data = wrap(batched)
    assert default_num_workers(data, 1) == 0
    list(shard(DataLoader(data, 4), rank_of(0, 1), torch.device("cpu"), seed=1, training=True))
    assert batched.calls == 3 * (2 if isinstance(data, StackDataset) else 1)


def test_a_subset_of_tensors_in_memory_equals_the_same_rows():
    data = float64_data(30)
    indices = list(range(29, 4, -2))
    nested = Subset(Subset(data, indices), range(1, 12))
    plain = Rows(TensorDataset(*(t[indices][1:12] for t in data.tensors)))
    models = [float64_model(), float64_model()]
    for model, dataset in zip(models, (nested, plain), strict=True):
        torch.manual_seed(0)
        adamw_trainer(model).train(dataset, 2, per_device_batch_size=3, train_dataloader_kwargs={"num_workers": 0})
    assert equal_weights(models[0].state_dict(), models[1].state_dict())


STACKED = {
    "dict": lambda x, y: StackDataset(x=x, y=TensorDataset(y, x)),
    "tuple": lambda x, y: StackDataset(TensorDataset(x), y[:, 0]),
    "nested": lambda x, y: Subset(StackDataset(StackDataset(x=x), y), range(8, 1, -1)),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("stack", STACKED.values(), ids=STACKED)
def test_stacked_tensors_are_read_by_batch_with_equal_results(stack, seed):
    class Slow(StackDataset):
        """Not a plain TensorDataset, so it is read sample by sample."""

    data = stack(*float64_data(9).tensors)
    slow = copy.deepcopy(data)
    (slow.dataset if isinstance(slow, Subset) else slow).__class__ = Slow

    def batches(dataset):
        torch.manual_seed(0)
        source = DataLoader(dataset, 4, shuffle=True)
        return list(shard(source, rank_of(0, 1), torch.device("cpu"), seed=seed, training=True)), torch.rand(())

    (at_once, random), (one_by_one, expected) = batches(data), batches(slow)
    assert tensors_in_memory(data) is not None
    assert tensors_in_memory(slow) is None
    assert torch.equal(random, expected)
    for ours, theirs in zip(at_once, one_by_one, strict=True):
        (leaves, structure), (expected, of_them) = tree_flatten(ours), tree_flatten(theirs)
        assert structure == of_them
        assert all(map(torch.equal, leaves, expected))


def test_stacked_datasets_of_other_types_are_read_by_sample():
    x, y = float64_data(3).tensors
    for data in (StackDataset(x, [1, 2, 3]), StackDataset(list(x), y), StackDataset(x, Subset(y, range(3)))):
        assert tensors_in_memory(data) is None
        batch = next(iter(shard(DataLoader(data, 2), rank_of(0, 1), torch.device("cpu"), seed=None, training=True)))
        assert torch.equal(batch[0], x[:2])


class Order(Sampler):
    """Any order, drawn one by one."""

    def __init__(self, order: Iterable[int]) -> None:
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return 3


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("sampler", [[-1, 0, -9], Order([-1, 0, -9]), BatchSampler([-1, 0, -9], 2, False)])
def test_negative_indices_are_those_of_a_dataloader(seed, sampler):
    kind = "batch_sampler" if isinstance(sampler, BatchSampler) else "sampler"
    for data in (
        numbers(9),
        Subset(numbers(12), [1, -1, 3, -2, 4, 5, 6, 7, 0]),
        Subset(Subset(numbers(9), range(9)), range(9)),
    ):
        source = DataLoader(data, **{kind: sampler} | ({} if kind == "batch_sampler" else {"batch_size": 2}))
        loader = shard(source, rank_of(0, 1), torch.device("cpu"), seed, training=True)
        assert [batch[0].tolist() for batch in loader] == [batch[0].tolist() for batch in source]


@pytest.mark.slow
@pytest.mark.parametrize("data", [float64_data(12), Rows(float64_data(12))])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_the_loader_can_be_read_while_an_epoch_is_under_way(data, workers):
    seen: list[torch.Tensor] = []
    inside: list[int] = []

    def look(trainer, batch, **kwargs):
        seen.append(batch[0])
        inside.append(sum(len(batch[0]) for batch in trainer.train_dataloader))
        next(iter(trainer.train_dataloader))  # and not to its end

    trainer = adamw_trainer(float64_model(), callbacks=[listener(on_train_step_end=look)], seed=1)
    trainer.train(data, 2, per_device_batch_size=5, train_dataloader_kwargs={"num_workers": 0} | workers)
    assert inside == [12] * 6
    for epoch in (seen[:3], seen[3:]):
        assert sorted(torch.cat(epoch)[:, 0].tolist()) == sorted(float64_data(12).tensors[0][:, 0].tolist())


def test_workers_are_used_only_where_they_pay_off():
    data = float64_data(4)
    assert default_num_workers(data, 1) == default_num_workers(Subset(data, [1]), 1) == 0
    assert default_num_workers(StackDataset(x=data.tensors[0], y=data.tensors[1]), 1) == 0
    assert default_num_workers(Batched(data), 1) == default_num_workers(ShuffledSamples(4), 1) == 0
    cores = len(os.sched_getaffinity(0))
    assert default_num_workers(Rows(data), 1) == (min(cores, 8) if cores > 1 else 0)
    assert default_num_workers(Rows(data), cores) == 0


def test_the_arguments_of_dataloaders_can_be_overridden():
    class Own(Trainer):
        def get_default_train_dl_kwargs(self, batch_size):
            return super().get_default_train_dl_kwargs(batch_size) | {"num_workers": 0, "drop_last": True}

    trainer = make_trainer(model=float64_model(), trainer_class=Own)
    sampler = WeightedRandomSampler(torch.ones(10), 7)
    trainer.train(Rows(float64_data(10)), 1, per_device_batch_size=3, train_dataloader_kwargs={"sampler": sampler})
    assert trainer.progress.samples == 6
    assert trainer.run_config.train_dl_kwargs["sampler"] is sampler
    assert trainer.train_dataloader.num_workers == 0


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_dataloader_of_an_overridden_method_is_used(seed, accumulation):
    class Own(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return DataLoader(self.train_dataset, batch_sampler=LengthBuckets())

    recorder = Recorder()
    trainer = make_trainer([recorder], float64_model(), Own, seed=seed)
    trainer.train(float64_data(11), 1, gradient_accumulation_steps=accumulation)
    assert recorder.counts == [3, 1, 2, 4, 1]
    assert trainer.progress.update == -(-5 // accumulation)


def test_any_iterable_of_batches_is_read():
    x, y = float64_data(9).tensors

    class Own(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return [(x[:4], y[:4]), (x[4:6], y[4:6]), (x[6:], y[6:])]

        create_eval_dataloader = create_train_dataloader

    model = float64_model()
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[])
    trainer.train(x, 2, x, gradient_accumulation_steps=2)
    assert trainer.progress.update == 4
    expected = nn.functional.mse_loss(model(x), y).item()
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert trainer.run_history.get_metric_values(name) == pytest.approx([expected] * 2, abs=1e-12)


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield from float64_data(10)


class EndlessOrder(Sampler):
    """An endless order, drawn from the generators of torch, numpy and python and its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.generator = torch.Generator()

    def __iter__(self):
        while True:
            own = torch.randint(self.size, (), generator=self.generator)
            yield int(own + torch.randint(9, ()) + np.random.randint(9) + random.randrange(9)) % self.size


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_endless_sampler_is_limited_by_updates(seed, batched, workers):
    sampler = EndlessOrder(9)
    kwargs = {"batch_sampler": BatchSampler(sampler, 4, False)} if batched else {"sampler": sampler}
    trainer = adamw_trainer(float64_model(), seed=seed)
    trainer.train(
        Rows(float64_data(9)),
        per_device_batch_size=4,
        max_num_train_steps=7,
        train_dataloader_kwargs={"num_workers": workers} | kwargs,
    )
    assert trainer.progress.samples == 28


class Visits:
    """A finite order without a length."""

    def __iter__(self):
        yield from (3, 1, 4, 1, 5)


@pytest.mark.parametrize("seed", [None, 1])
def test_an_epoch_ends_with_a_sampler_without_a_length(seed):
    seen: list[Any] = []
    look = listener(on_train_step_end=lambda t, **_: seen.append(t.batch_indices))
    kwargs = {"sampler": Visits(), "num_workers": 0}
    train(make_trainer([look], seed=seed), 2, train_dataset=Rows(make_data()), train_dataloader_kwargs=kwargs)
    assert seen == [[3, 1], [4, 1], [5]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
def test_a_sampler_without_an_end_follows_from_seed_and_epoch(batched):
    def read_indices(epoch, start, world_size=1, batch_size=50):
        def source(rank):
            if batched:
                return DataLoader(numbers(1000), batch_sampler=BatchSampler(EndlessOrder(1000), batch_size, False))
            return DataLoader(numbers(1000), batch_size, sampler=EndlessOrder(1000))

        by_rank = []
        for rank in range(world_size):
            loader = shard(source(rank), rank_of(rank, world_size), torch.device("cpu"), 3, True)
            by_rank.append(list(islice(loader.steps(epoch, start), 2400 // batch_size // world_size)))
        return [i for step in zip(*by_rank, strict=True) for i in samples(step)]

    before = torch.get_rng_state()
    whole = read_indices(1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert read_indices(1, 0) == whole
    assert read_indices(2, 0) != whole
    assert read_indices(1, 0, world_size=2, batch_size=25) == whole
    assert read_indices(1, 1130, batch_size=20)[: 2400 - 1130] == whole[1130:]


def test_a_batch_sampler_continues_in_the_middle_of_a_batch():
    def source(rank, batch_size=5):
        return DataLoader(numbers(23), batch_sampler=BatchSampler(RandomSampler(range(23)), batch_size, False))

    whole = [i for step in read_from(source, 1) for i in samples(step)]
    assert sorted(whole) == [*range(23)]
    for start in range(24):
        assert [i for step in read_from(source, 1, start) for i in samples(step)] == whole[start:]
        rest = [i for step in read_from(partial(source, batch_size=4), 2, start) for i in samples(step)]
        assert rest == whole[start:]
    with pytest.raises(ValueError, match=r"batch_sampler ended after 23 samples of this epoch, but .* already seen 24"):
        read_from(source, 1, 24)


@pytest.mark.parametrize("data", [numbers(9), Rows(numbers(9))])
def test_indices_beyond_a_samplers_length_are_dropped(data):
    loader = shard(DataLoader(data, 2, sampler=Order(range(4))), rank_of(0, 1), torch.device("cpu"), None, True)
    with pytest.warns(UserWarning, match="The sampler Order gives more indices than its length of 3"):
        assert len(list(loader)) == 2


@pytest.mark.parametrize(("given", "seed"), [(2, None), (2, 1), (4, 1)])
@pytest.mark.parametrize("data", [numbers(9), Rows(numbers(9))])
def test_the_length_of_a_sampler_must_be_right(given, seed, data):
    loader = shard(DataLoader(data, 2, sampler=Order(range(given))), rank_of(0, 1), torch.device("cpu"), seed, True)
    with pytest.raises(ValueError, match=f"The sampler Order gives {given}.* indices, but its length is 3"):
        list(loader)
    loader = shard(DataLoader(data, 2, sampler=Order(range(3))), rank_of(0, 1), torch.device("cpu"), seed, True)
    assert len(list(loader)) == 2


@pytest.mark.extension("failed_batches")
def test_a_wrong_dataset_length_is_not_skipped_as_a_batch():
    trainer, kwargs = (
        make_trainer([callbacks.SkipFailedBatchesCallback]),
        {"sampler": Order(range(2)), "num_workers": 0},
    )
    with pytest.raises(ValueError, match="The sampler Order gives 2 indices, but its length is 3"):
        train(trainer, train_dataset=Rows(make_data()), train_dataloader_kwargs=kwargs)


def test_a_loader_can_be_copied_and_knows_its_device():
    trainer = train(make_trainer())
    again = copy.copy(trainer.train_dataloader)
    assert again.device == trainer.device
    assert again.batch_size == 2
    assert [len(x) for x, _ in again] == [2, 2, 2]


def test_data_without_an_end_need_a_limit_of_updates():
    trainer = adamw_trainer(float64_model(), callbacks=[ProgressBarCallback(show_always=True)])
    factory = partial(OneCycleLR, max_lr=0.1, total_steps=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)
    trainer.train(
        Endless(),
        per_device_batch_size=4,
        max_num_train_steps=7,
        gradient_accumulation_steps=2,
        create_scheduler_fn=factory,
    )
    assert trainer.progress.update == trainer.scheduler.last_epoch == 7
    factory = partial(OneCycleLR, max_lr=0.1, total_steps=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH)
    with pytest.raises(ValueError, match=r"NUM_UPDATE_STEPS_PER_EPOCH cannot be resolved: .* max_num_train_steps"):
        trainer.train(Endless(), 1, create_scheduler_fn=factory)


def test_hugging_face_datasets_train_as_tensors_do():
    datasets = pytest.importorskip("datasets")
    x, y = float64_data(10, dtype=torch.float32).tensors
    data = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    stream = data.to_iterable_dataset().with_format("torch")
    data = data.with_format("torch")

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = float64_model(dtype=torch.float32)

        def forward(self, x):
            return self.inner(x)

    results = []
    for dataset in (data, stream, TensorDataset(x, y)):
        model = Named() if not isinstance(dataset, TensorDataset) else float64_model(dtype=torch.float32)
        trainer = adamw_trainer(model)
        kwargs = {} if isinstance(dataset, datasets.IterableDataset) else {"shuffle": False}
        trainer.train(dataset, 1, dataset, per_device_batch_size=4, train_dataloader_kwargs=kwargs)
        results.append(trainer.run_history.to_dict())
    assert results[0] == results[1] == results[2]


class TwoTasks(Trainer):
    seen: list[Any]

    def calculate_train_batch_loss(self, batch):
        self.seen.append({name: part[0][:, 0].tolist() for name, part in batch.items()})
        losses = {name: self.loss_func(self.model(x), y) for name, (x, y) in batch.items()}
        return {"loss": losses, "batch_size": len(batch["a"][0])}


def tagged(size: int, offset: int) -> TensorDataset:
    column = torch.arange(size, dtype=torch.float64) + offset
    return TensorDataset(column[:, None].expand(-1, 5).contiguous(), float64_data(size).tensors[1])


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("wrong", [[True, False] * 5, np.arange(10) % 2 == 0, torch.ones(10) > 0, [0.0, 2.5], (0.5,)])
def test_non_integer_indices_are_refused_in_memory(seed, wrong):
    data = float64_data(10)
    trainer = adamw_trainer(float64_model(), seed=seed)
    with pytest.raises(TypeError, match=r"must be integers, not torch\.(bool|float64|float32) as in \["):
        trainer.train(Subset(data, wrong), 1)
    with pytest.raises(TypeError, match=r"Convert a mask by"):
        trainer.train(data, 1, train_dataloader_kwargs={"sampler": list(wrong)})


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("indices", [[3, -1], np.array([3, 9], np.int32), [np.int64(3), 9], list(torch.arange(3))])
def test_indices_may_be_integers_of_any_kind(seed, indices):
    data = float64_data(10)
    expected = data.tensors[0][[int(index) for index in indices]]
    for source in (DataLoader(Subset(data, indices), 4), DataLoader(data, 4, sampler=indices)):
        [(x, _)] = shard(source, rank_of(0, 1), torch.device("cpu"), seed, training=True)
        assert torch.equal(x, expected)


def test_a_subset_may_be_empty():
    assert list(shard(DataLoader(Subset(float64_data(10), []), 4), rank_of(0, 1), torch.device("cpu"), 0, True)) == []


class Scaled(Rows):
    """Rows that are set up in each worker."""

    scale = 1.0

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * self.scale, y


def scale_rows(worker_id):
    torch.utils.data.get_worker_info().dataset.scale = 2.0


@pytest.mark.parametrize("seed", [None, 0])
def test_workers_can_set_up_their_copy_of_the_dataset(seed):
    data = float64_data(6)
    kwargs = {"num_workers": 1, "worker_init_fn": scale_rows}
    trainer = Trainer(nn.Identity(), None, None, callbacks=[], seed=seed)
    outputs = trainer.predict(Scaled(data), dataloader_kwargs=kwargs)
    assert torch.equal(outputs, 2 * data.tensors[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("kind", ["memory", "subset", "map", "batch sampler"])
def test_the_indices_of_a_batch_are_those_of_its_samples(kind, seed):
    whole = float64_data(20)
    data = {"memory": whole, "subset": Subset(whole, range(3, 12))}.get(kind, Rows(whole))
    loader = {"batch_sampler": BatchSampler(RandomSampler(range(9)), 4, False)} if kind == "batch sampler" else {}
    seen: list[int] = []

    class Check(TrainerCallback):
        def on_train_step_end(self, trainer, batch, **kwargs):
            expected = torch.stack([data[i][0] for i in trainer.batch_indices])
            assert torch.equal(batch[0], expected)
            seen.extend(trainer.batch_indices)

        on_eval_step_end = on_predict_step_end = on_train_step_end

    model = float64_model()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[Check], seed=seed)
    trainer.train(data, 1, data, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0} | loader)
    trainer.predict(data, per_device_batch_size=4)
    trained = 9 if kind == "batch sampler" else len(data)
    assert sorted(seen[:trained]) == [*range(trained)]
    assert seen[trained:] == [*range(len(data))] * 2


def test_the_indices_of_a_streams_samples_are_not_known():
    known = []
    watch = listener(on_train_step_end=lambda trainer, **kwargs: known.append(trainer.batch_indices))
    train(make_trainer([watch]), train_dataset=Stream(), train_dataloader_kwargs={})
    assert known == [None] * 3


@pytest.mark.parametrize("seed", [None, 1])
def test_training_datasets_by_name_give_batches_by_name(seed, capsys):
    data = {"a": tagged(6, 0), "b": tagged(10, 100)}
    for dataset, length in ((data, 6), (NamedDatasets(data, length="max"), 10)):
        model = float64_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = TwoTasks(model, nn.MSELoss(), optimizer, callbacks=[], seed=seed)
        trainer.seen = []
        trainer.train(dataset, 2, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0})
        assert trainer.progress.samples == 2 * length
        epochs = trainer.seen[: len(trainer.seen) // 2], trainer.seen[len(trainer.seen) // 2 :]
        for epoch in epochs:
            first = [sample for batch in epoch for sample in batch["a"]]
            second = [sample for batch in epoch for sample in batch["b"]]
            assert len(first) == len(second) == length
            assert set(first[:6]) == set(range(6))
            assert set(first[6:]) < set(range(6))
            assert len(set(second)) == length
            assert set(second) <= set(range(100, 110))
        assert epochs[0] != epochs[1]
        assert {"train_a_epoch", "train_b_epoch"} <= set(trainer.run_history.get_metric_names())
    start = "The datasets differ in length ('a' 6, 'b' 10): an epoch is as long as the "
    assert capsys.readouterr().out.splitlines() == [
        f"{start}shortest, 'a'; of the others, as many samples are used, drawn again in each epoch.",
        f"{start}longest, 'b'; the others are repeated.",
    ]
    trainer = TwoTasks(model, nn.MSELoss(), optimizer, callbacks=[], seed=seed)
    trainer.seen = []
    in_order = {"shuffle": False, "num_workers": 0}
    trainer.train(data, 1, per_device_batch_size=4, train_dataloader_kwargs=in_order)
    assert "as many samples are used, the first ones." in capsys.readouterr().out
    trainer.train({"a": data["a"], "b": tagged(6, 100)}, 1, per_device_batch_size=4, train_dataloader_kwargs=in_order)
    assert capsys.readouterr().out == ""


def test_datasets_by_name_in_order():
    sampler_order = []
    trainer = adamw_trainer(float64_model())
    data = NamedDatasets({"a": tagged(2, 0), "b": tagged(3, 100)}, length="max")

    class Keep(TrainerCallback):
        def on_train_step_end(self, trainer, batch, **kwargs):
            sampler_order.extend(zip(batch["a"][0][:, 0].tolist(), batch["b"][0][:, 0].tolist(), strict=True))

    class Sum(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(batch["a"][0]).mean(), "batch_size": len(batch["a"][0])}

    trainer = make_trainer([Keep], float64_model(), Sum, loss_func=None)
    trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs={"shuffle": False})
    assert sampler_order == [(0, 100), (1, 101), (0, 102)]


@pytest.mark.parametrize("indices", [range(5), np.arange(5), torch.arange(5)])
def test_datasets_by_name_take_indices_of_any_kind(indices):
    data = Subset(NamedDatasets({"a": numbers(5), "b": numbers(3)}, length="max"), indices)
    assert [(sample["a"][0].item(), sample["b"][0].item()) for sample in (data[3], data[4])] == [(3, 0), (4, 1)]


def test_evaluation_datasets_by_name_are_evaluated_one_by_one():
    trainer = adamw_trainer(float64_model())
    clean, noisy = float64_data(9), float64_data(20)
    trainer.train(clean, 2, {"clean": clean, "noisy": noisy})
    history = trainer.run_history.to_dict()
    assert {name: len(values) for name, values in history.items()} == {
        "train_loss_epoch": 2,
        "clean_eval_loss_epoch": 2,
        "noisy_eval_loss_epoch": 2,
    }
    metrics = trainer.evaluate({"clean": clean, "noisy": noisy})
    assert metrics.keys() == {"clean_evaluation_loss", "noisy_evaluation_loss"}
    assert metrics["clean_evaluation_loss"] == pytest.approx(trainer.evaluate(clean)["evaluation_loss"], abs=1e-12)
    assert metrics["clean_evaluation_loss"] == pytest.approx(history["clean_eval_loss_epoch"][-1], abs=1e-12)


def test_predictions_can_be_read_part_by_part():
    trainer = adamw_trainer(float64_model())
    parts = []
    for part in trainer.predict_iter(float64_data(10), per_device_batch_size=4):
        assert not trainer.model.training
        parts.append(part)
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat(parts), trainer.predict(float64_data(10), per_device_batch_size=4))
    assert trainer.model.training


def test_an_abandoned_prediction_leaves_the_model_unchanged():
    trainer = adamw_trainer(float64_model())
    parts = trainer.predict_iter(float64_data(10), per_device_batch_size=4)
    next(parts)
    parts.close()
    assert trainer.model.training
    trainer.train(float64_data(10), 1)


class Lengths(TrainerCallback):
    def on_training_run_start(self, trainer, **kwargs):
        self.lengths = len(trainer.train_dataloader), len(trainer.eval_dataloader)


@pytest.mark.parametrize("how", ["callback", "context", "variable"])
def test_loaders_end_at_a_limit_of_batches(how, monkeypatch):
    lengths = Lengths()
    if how == "callback":
        trainer = adamw_trainer(float64_model(), callbacks=[LimitBatchesCallback(3), lengths])
    elif how == "variable":
        monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", "3")
        trainer = adamw_trainer(float64_model(), callbacks=[lengths])
    else:
        with LimitBatches(3):
            with LimitBatches(5):
                assert os.environ["PT_ACC_LIMIT_BATCHES"] == "5"
            trainer = adamw_trainer(float64_model(), callbacks=[lengths])
        assert "PT_ACC_LIMIT_BATCHES" not in os.environ
    total = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    trainer.train(
        float64_data(40),
        2,
        float64_data(30),
        per_device_batch_size=4,
        create_scheduler_fn=partial(OneCycleLR, max_lr=0.1, total_steps=total),
    )
    assert lengths.lengths == (3, 3)
    assert trainer.progress.update == trainer.scheduler.last_epoch == trainer.scheduler.total_steps == 6
    assert trainer.progress.samples == 24


class CountsEvaluationSteps(TrainerCallback):
    """Counts the steps of each evaluation within an epoch (``True``) and after one."""

    def __init__(self) -> None:
        self.steps: dict[bool, list[int]] = {True: [], False: []}

    def on_eval_epoch_start(self, trainer, is_intermediate, **kwargs):
        self.steps[is_intermediate].append(0)
        self.current = self.steps[is_intermediate]

    def on_eval_step_end(self, trainer, **kwargs):
        self.current[-1] += 1


@pytest.mark.parametrize(("only_intermediate", "after_epoch"), [(True, 8), (False, 2)])
def test_an_eval_step_limit_may_also_hold_after_epochs(only_intermediate, after_epoch):
    count, limit = CountsEvaluationSteps(), LimitEvalStepsCallback(2, only_intermediate)
    trainer = adamw_trainer(float64_model(), callbacks=[count, limit, StepBasedEvaluationCallback(1)])
    trainer.train(float64_data(4), 1, float64_data(30), per_device_batch_size=4)
    assert count.steps == {True: [2], False: [after_epoch]}
    assert len(trainer.eval_dataloader) == 8


@pytest.mark.parametrize("limits", [[5, 3], [3, 5], [3, 5, 4]])
@pytest.mark.parametrize(("of_all", "expected"), [(None, (3, 8)), (2, (2, 2)), (6, (3, 6))])
def test_the_smallest_of_several_evaluation_limits_counts(limits, of_all, expected):
    count = CountsEvaluationSteps()
    callbacks = [count, StepBasedEvaluationCallback(1), *map(LimitEvalStepsCallback, limits)]
    callbacks += [] if of_all is None else [LimitBatchesCallback(of_all)]
    trainer = adamw_trainer(float64_model(), callbacks=callbacks)
    trainer.train(float64_data(8), 2, float64_data(30), per_device_batch_size=4)
    assert count.steps == {True: [expected[0]] * 4, False: [expected[1]] * 2}


def test_a_limit_of_evaluations_may_be_extended_in_a_subclass():
    class Mine(LimitEvalStepsCallback):
        def on_eval_epoch_start(self, trainer, is_intermediate=False, **kwargs):
            super().on_eval_epoch_start(trainer, is_intermediate, **kwargs)

        def on_eval_epoch_end(self, trainer, is_intermediate=False, **kwargs):
            super().on_eval_epoch_end(trainer, is_intermediate, **kwargs)

    lengths: list[int] = []
    look = listener(on_eval_step_end=lambda t, **_: lengths.append(len(t.eval_dataloader)))
    callbacks = [Mine(2), look, StepBasedEvaluationCallback(2)]
    adamw_trainer(float64_model(), callbacks=callbacks).train(float64_data(8), 1, float64_data(12), 4)
    assert lengths == [2, 2, 3, 3, 3]


class Words(IterableDataset[str]):
    """A stream of samples without a tensor."""

    def __iter__(self) -> Any:
        return iter("ab")


BAD_INPUT = [
    (
        lambda t: t.train({"a": float64_data(4), "b": TensorDataset(torch.empty(0, 1))}, 1),
        r"train_dataset\['b'\] is empty",
    ),
    (lambda t: t.train({}, 1), r"train_dataset={}"),
    (lambda t: t.train({"a": Endless()}, 1), r"The dataset 'a' \(Endless\) cannot be indexed or has no length"),
    (lambda t: t.train(float64_data(4), 1, {"a": TensorDataset(torch.empty(0))}), r"eval_dataset\['a'\] is empty"),
    (lambda t: t.predict({"a": float64_data(4)}), "predict takes one dataset"),
    (lambda t: NamedDatasets({"a": [1]}, length="mean"), "length='mean' must be 'min' or 'max'"),
    (lambda t: LimitBatchesCallback(0), "num_batches=0 must be at least 1"),
    (lambda t: LimitEvalStepsCallback(-1), "num_eval_steps=-1 must be at least 1"),
    (lambda t: t.evaluate(Words()), "batch size cannot be determined .* Return 'batch_size'"),
]


@pytest.mark.parametrize(("provoke", "message"), BAD_INPUT)
def test_data_that_cannot_be_trained_on_are_refused(provoke, message):
    class AnyBatch(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {"loss": torch.zeros(())}

    if "batch size" in message:
        trainer = AnyBatch(float64_model(), None, None, callbacks=[])
    else:
        trainer = adamw_trainer(float64_model())
    with pytest.raises(ValueError if "predict" not in message else TypeError, match=message):
        provoke(trainer)


def test_a_bad_limit_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", "many")
    with pytest.raises(ValueError, match="PT_ACC_LIMIT_BATCHES='many'"):
        adamw_trainer(float64_model())


class Dies(Rows):
    def __getitem__(self, index):
        if index == 3 and torch.utils.data.get_worker_info() is not None:
            os._exit(9)
        return super().__getitem__(index)


def fails_to_collate(rows):
    raise KeyError("no such column")


@pytest.mark.parametrize(
    ("dataset", "kwargs", "error", "message"),
    [
        # What torch says of it depends on the instant at which the worker dies. Its signal handler raises wherever the
        # process is, even where Python can only ignore it; the loader finds out a little later then.
        pytest.param(
            Dies(float64_data(8)),
            {"num_workers": 2},
            (RuntimeError, OSError),
            r"worker .* exited unexpectedly|[Cc]onnection",
            marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        ),
        (Rows(float64_data(8)), {"num_workers": 2, "collate_fn": fails_to_collate}, KeyError, "in fails_to_collate"),
        (Rows(float64_data(8)), {"num_workers": 0, "collate_fn": fails_to_collate}, KeyError, "no such column"),
    ],
)
def test_errors_while_reading_reach_the_user(dataset, kwargs, error, message):
    with pytest.raises(error, match=message):
        adamw_trainer(float64_model()).train(dataset, 1, per_device_batch_size=2, train_dataloader_kwargs=kwargs)


def sampler_without_an_end() -> Any:
    """Without a seed, all processes read their shares of rank 0's draws."""
    random.seed(own_rank())
    seen = []

    class Keep(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            seen.append(trainer.batch_indices)

    trainer = adamw_trainer(float64_model(), callbacks=[Keep])
    data, sampler = float64_data(50), OrderWithoutEnd()
    kwargs = {"train_dataloader_kwargs": {"sampler": sampler}, "per_device_batch_size": global_batch(120)}
    trainer.train(data, max_num_train_steps=20, **kwargs)
    random.seed(0)
    return {"seen": seen, "drawn": [random.randrange(50) for _ in range(20 * 120)]}


@pytest.mark.processes
def test_processes_share_the_draws_of_rank_0s_sampler(ranks):
    results = ranks(sampler_without_an_end)
    steps = zip(*(result["seen"] for result in results), strict=True)
    assert [index for step in steps for indices in step for index in indices] == results[0]["drawn"]


class Counting(Trainer):
    """Records numbers, and reports a given number of samples."""

    count = staticmethod(len)
    saves_attributes = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def calculate_train_batch_loss(self, batch):
        self.seen.append(batch[0].tolist())
        return {"loss": self.model(batch[0][:, None]).mean(), "batch_size": self.count(batch[0])}


class Numbers(IterableDataset):
    def __init__(self, size: int, batch_size: int | None = None) -> None:
        values = torch.arange(size, dtype=torch.float32)
        self.items = [(x,) for x in (values if batch_size is None else values.split(batch_size))]

    def __iter__(self):
        return iter(self.items)


def seen_batches(source: Any, batch_size: int, count: Any = len, callbacks: Any = (), **kwargs: Any) -> list[Any]:
    """Train an epoch on a stream, or on a loader of one's own, and return what the steps were given."""

    class Own(Counting):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return source

    model = nn.Linear(1, 1)
    trainer_class = Counting if isinstance(source, IterableDataset) else Own
    trainer = trainer_class(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks, seed=0)
    trainer.count = count
    trainer.train(source, 1, per_device_batch_size=batch_size, **kwargs)
    return trainer.seen


@pytest.mark.parametrize(
    ("source", "kwargs"),
    [(Numbers(30, 5), {"train_dataloader_kwargs": {"batch_size": None}}), (Numbers(30, 5).items, {})],
)
@pytest.mark.parametrize("count", [len, lambda x: 2, lambda x: 7])
@pytest.mark.filterwarnings("ignore:The resumed run had counted")
def test_an_epoch_continues_after_its_steps_however_counted(tmp_path, source, kwargs, count):
    whole = seen_batches(source, 5, count, [SavesEachUpdate(tmp_path)], **kwargs)
    assert len(whole) == 6
    for update in range(1, 6):
        assert seen_batches(source, 5, count, resume_from=tmp_path / f"{update}", **kwargs) == whole[update:]


class Bare:
    """A batch whose size only the step knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getitem__(self, index):
        return [self.x][index]


def test_an_epoch_of_batches_of_unknown_size_continues(tmp_path):
    source = [Bare(x) for x in torch.arange(30.0).split(5)]
    whole = seen_batches(source, 5, callbacks=[SavesEachUpdate(tmp_path)])
    assert len(whole) == 6
    assert seen_batches(source, 5, resume_from=tmp_path / "4") == whole[4:]


def test_packed_samples_are_counted_by_the_batch_size(tmp_path):
    def pack(samples):
        return [torch.cat([x.repeat(3) for (x,) in samples])]

    def run(**kwargs):
        return seen_batches(Numbers(30), 5, lambda x: len(x) // 3, collate_fn=pack, **kwargs)

    whole = run(callbacks=[SavesEachUpdate(tmp_path)])
    assert run(resume_from=tmp_path / "4") == whole[4:]


def test_steps_that_were_counted_differently_are_warned_of(tmp_path):
    seen_batches(Numbers(30, 5).items, 5, callbacks=[SavesEachUpdate(tmp_path)])
    with pytest.warns(UserWarning, match=r"had counted 15 samples in 3 steps of this epoch, but .* now holds 30"):
        seen_batches(Numbers(40, 10).items, 5, resume_from=tmp_path / "3")


@pytest.mark.parametrize("batch_size", [3, 4, 9])
def test_a_stream_continues_with_another_batch_size(tmp_path, batch_size):
    seen_batches(Numbers(30), 8, callbacks=[SavesEachUpdate(tmp_path)])
    rest = seen_batches(Numbers(30), batch_size, resume_from=tmp_path / "2")
    assert [i for batch in rest for i in batch] == [*range(16, 30)]


def test_resuming_an_unsuitable_stream_is_explained(tmp_path):
    seen_batches(Numbers(30), 8, callbacks=[SavesEachUpdate(tmp_path)])
    with pytest.raises(ValueError, match=r"data ended after 1 batches of this epoch, but .* already seen 2\."):
        seen_batches(Numbers(8), 8, resume_from=tmp_path / "2")
    with pytest.raises(ValueError, match=r"data ended after 15 samples of this epoch, but .* already seen 16"):
        seen_batches(Numbers(15), 5, resume_from=tmp_path / "2")
    with pytest.raises(ValueError, match="in the middle of a batch of type deque, which cannot be split"):
        seen_batches(
            Numbers(30),
            5,
            resume_from=tmp_path / "2",
            collate_fn=lambda rows: deque([torch.stack(*zip(*rows, strict=True))]),
        )


def resumed_streams() -> Any:
    """Streams go on with other batch sizes, own batches after as many as there were; both may have too few."""
    results = {}

    def run(name, data, batch_size, callbacks=(), trainer_class=Trainer, **kwargs):
        recorder, model = Recorder(), float64_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = trainer_class(model, nn.MSELoss(), optimizer, callbacks=[recorder, *callbacks], seed=0)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*give other batches than when")  # those of fewer do
                trainer.train(data, 1, per_device_batch_size=batch_size, **kwargs)
        except (ValueError, RuntimeError) as error:
            results[name] = str(error)
        else:
            results[name] = recorder.inputs

    with shared_folder() as folder:
        data, fewer = float64_data(50), float64_data(5)
        saving = SavesEachUpdate(folder / "of a stream")
        run("stream", OrderedStream(data), 4, [saving])
        run("stream with other batches", OrderedStream(data), 5, resume_from=saving.folder / "2")
        run("stream of fewer", OrderedStream(fewer), 4, resume_from=saving.folder / "2")
        saving, limit = SavesEachUpdate(folder / "of own"), LimitBatchesCallback(4)
        data, fewer = float64_data(12 * job_size()), float64_data(2 * job_size())
        run("own", data, 1, [saving, limit], OwnOfSix)
        run("own again", data, 1, [limit], OwnOfSix, resume_from=saving.folder / "2")
        run("own of fewer", fewer, 1, [limit], OwnOfSix, resume_from=saving.folder / "2")
        run("own of larger", data, 1, [], OwnOfLarger, resume_from=saving.folder / "2")
        run("own of one", data, 1, [], OwnOfOne)
        run("empty stream", OrderedStream([]), 1)
    return results


@pytest.mark.processes
def test_streams_and_own_batches_continue_on_several_processes(ranks):
    results = ranks(resumed_streams)
    done = 2 * 4 * ranks.world_size
    expected = sorted(float64_data(50).tensors[0][done:, 0].tolist())
    found = [x for result in results for batch in result["stream with other batches"] for x in batch[:, 0].tolist()]
    assert sorted(found) == expected
    for result in results:
        assert len(result["own"]) == 4
        assert torch.equal(torch.cat(result["own again"]), torch.cat(result["own"][2:]))
        assert (
            f"data ended after 5 samples of this epoch, but the resumed run had already seen {done}"
            in result["stream of fewer"]
        )
        assert "data ended after" in result["own of fewer"]
        assert "in the middle of the batches of several processes, which cannot be split" in result["own of larger"]
        assert "train_dataset gave no batch" in result["empty stream"]
        others = ranks.world_size - 1
        assert f"{others} of {ranks.world_size} processes have no training batch at all" in result["own of one"]


class CollectsGarbage(IterableDataset):
    """Runs the garbage collector before each sample, in the process that reads it."""

    def __iter__(self):
        for sample in float64_data(8):
            gc.collect()
            yield sample


class CollectsGarbageRows(Rows):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


WORKERS_THAT_DO_NOT_BEGIN = """
import os, pathlib, sys, time, warnings
from pytorch_accel_lite.data import worker_startup
from tests.launching import run_code
from tests.small_models import Rows, Stream, make_data, make_trainer, train

tried = pathlib.Path(sys.argv[1])

def hang_at_first():
    count = len(list(tried.iterdir()))
    (tried / str(count)).touch()
    if count in (0, 2):  # the first worker, and the second
        time.sleep(1000)

os.register_at_fork(after_in_child=hang_at_first)
worker_startup.SECONDS_TO_BEGIN = 0.5
warnings.filterwarnings("ignore", "Stream gives the same batch to two workers")
trainer = train(make_trainer(), train_dataset=Stream() if sys.argv[2] == "stream" else Rows(make_data()),
                train_dataloader_kwargs={"num_workers": 2, "batch_size": 2})
print(trainer.progress.samples, len(list(tried.iterdir())))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "samples"), [("map", 6), ("stream", 12)])
def test_a_forked_worker_that_does_not_begin_is_replaced(tmp_path, kind, samples):
    assert run_code(WORKERS_THAT_DO_NOT_BEGIN, str(tmp_path), kind).split() == [str(samples), "4"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "seed"), some_of(product(["rows", "stream", "own"], [None, 0])))
def test_workers_do_not_finalise_objects_of_their_parent(tmp_path, kind, seed):
    """A process group or an iterator finalised in a fork waits forever for threads that it does not have."""
    dataset = CollectsGarbageRows(float64_data(8)) if kind == "rows" else CollectsGarbage()
    finalised = tmp_path / "finalised"

    class Discarded:
        def __init__(self):
            self.itself = self

        def __del__(self):
            with finalised.open("a") as file:
                file.write(f"{os.getpid()}\n")

    gc.disable()
    try:
        Discarded()
        kwargs = {"num_workers": 2} if kind == "rows" else {"num_workers": 1, "shuffle": False}
        trainer = adamw_trainer(float64_model(), seed=seed)
        if kind == "own":
            own = OwnShard(DataLoader(dataset, 2, num_workers=1))
            trainer.create_train_dataloader = lambda *_: own
        trainer.train(dataset, 1, None, 2, train_dataloader_kwargs=kwargs)
    finally:
        gc.enable()
    gc.collect()
    assert finalised.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("value", ["", "none", "None"])
def test_a_time_limit_of_none_is_no_limit(value, monkeypatch):
    monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", value)
    lengths = Lengths()
    adamw_trainer(float64_model(), callbacks=[lengths]).train(
        float64_data(40), 1, float64_data(30), per_device_batch_size=4
    )
    assert lengths.lengths == (10, 8)


def shuffled_order() -> Any:
    """Ranks whose own generators differ agree on an order; each sample is seen once in an epoch."""
    results = {}
    data = float64_data(23)
    tagged = TensorDataset(torch.arange(23, dtype=torch.float64)[:, None].expand(-1, 5).contiguous(), data.tensors[1])
    for seed in (None, 5):
        for name, dataset in (("memory", tagged), ("rows", Rows(tagged))):
            torch.manual_seed(1 + own_rank())
            recorder = Recorder()
            trainer = adamw_trainer(float64_model(), callbacks=[recorder], seed=seed)
            trainer.train(dataset, 2, per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 0})
            results[seed, name] = [batch[:, 0].tolist() for batch in recorder.inputs]
    sampler = WeightedRandomSampler(torch.ones(23), 23)
    torch.manual_seed(1 + own_rank())
    recorder = Recorder()
    trainer = adamw_trainer(float64_model(), callbacks=[recorder])
    trainer.train(tagged, 1, per_device_batch_size=2, train_dataloader_kwargs={"sampler": sampler})
    results["weighted"] = [batch[:, 0].tolist() for batch in recorder.inputs]
    return results


def test_ranks_with_generators_of_their_own_agree_on_an_order(ranks):
    results = ranks(shuffled_order)
    n = ranks.world_size
    steps = -(-23 // (2 * n))
    for key in results[0]:
        if key == "weighted":
            assert sum(len(batch) for result in results for batch in result[key]) == 23
            continue
        by_epoch = []
        for epoch in range(2):
            batches = [result[key][epoch * len(result[key]) // 2 :][: len(result[key]) // 2] for result in results]
            seen = [sample for rank in batches for batch in rank for sample in batch]
            assert sorted(seen) == list(range(23))
            by_epoch.append(batches)
        assert by_epoch[0] != by_epoch[1]
        assert max(len(rank) for rank in by_epoch[0]) == steps


def seeded_augmentation() -> Any:
    """With a seed, the same weights for 0, 1 and 2 workers, whatever the number of processes."""
    results = {}
    for workers in (0, 1, 2):
        model = float64_model()
        trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), seed=3)
        trainer.train(
            NoisyRows(float64_data(26)),
            2,
            per_device_batch_size=global_batch(6),
            train_dataloader_kwargs={"num_workers": workers},
        )
        results[workers] = weights(model)
    return results


@two_are_enough
def test_with_a_seed_workers_and_processes_change_no_result(ranks):
    alone = seeded_augmentation()
    assert equal_weights(alone[0], alone[1])
    assert equal_weights(alone[0], alone[2])
    for result in ranks(seeded_augmentation):
        assert equal_weights(result[0], result[1])
        assert equal_weights(result[0], result[2])
        assert largest_difference(result[0], alone[0]) < 1e-10


def test_a_users_batch_sampler_is_divided_among_processes(ranks):
    results = ranks(batch_sampler)
    assert sum(size for result in results for size in result["sizes"]) == 22
    assert {result["samples"] for result in results} == {22}
    assert {result["updates"] for result in results} == {2 * -(-5 // ranks.world_size)}
    if ranks.world_size == 2:
        assert [result["sizes"][:3] for result in results] == [[3, 2, 1], [1, 4]] or results[1]["sizes"][0] == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_in_a_dataset_does_not_end_the_epoch(workers):
    class Ending(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise StopIteration
            return super().__getitem__(index)

    trainer = make_trainer()
    with pytest.raises(RuntimeError, match=r"^generator raised StopIteration") as caught:
        train(trainer, train_dataset=Ending(make_data(8)), train_dataloader_kwargs={"num_workers": workers})
    assert isinstance(caught.value.__cause__, StopIteration)


class Read(IterableDataset[Any]):
    """Reads samples in workers: all of them in each, or the part of each."""

    def __init__(self, x: torch.Tensor, divides: bool) -> None:
        self.samples = TensorDataset(x, x.sum(1, keepdim=True))
        self.divides = divides

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return iter([*self.samples][worker.id :: worker.num_workers] if self.divides else [*self.samples])


@pytest.mark.parametrize(
    ("stream", "warns"),
    [
        (Read(torch.randn(8, 4), divides=False), True),
        (Read(torch.randn(8, 4), divides=True), False),
        (Read(torch.ones(8, 4), divides=False), False),  # cannot be told
    ],
)
def test_workers_that_each_read_a_whole_stream_are_warned_of(stream, warns):
    with pytest.warns(UserWarning, match="Read gives the same batch to two workers") if warns else nullcontext():
        train(make_trainer(), train_dataset=stream, train_dataloader_kwargs={"num_workers": 2})


class Promises(Stream):
    """A stream whose length is not that of what it yields."""

    def __init__(self, length: int) -> None:
        super().__init__(8)
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(("length", "warns"), [(20, True), (8, False)])
def test_a_stream_that_is_shorter_than_its_length_is_warned_of(length, warns):
    message = "ended after 4 steps of this epoch, but their length is 10 steps"
    with pytest.warns(UserWarning, match=message) if warns else nullcontext():
        train(make_trainer(), train_dataset=Promises(length))
    train(make_trainer(), train_dataset=Promises(20), epochs=None, max_num_train_steps=3)
