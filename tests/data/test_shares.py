"""The shares of processes: every sample once in an epoch, from any position, on any number of processes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pytorch_accel_lite.data import shard
from pytorch_accel_lite.data.steps_and_shares import count_global_batches, global_batches, share_bounds
from tests.loaders import numbers, rank_of, read, read_from, samples
from tests.ranks import Recorder
from tests.ranks import rank as own_rank
from tests.small_models import Rows, adamw_trainer, float64_data, float64_model
from tests.streams import LengthBuckets

sizes = st.integers(1, 60)
batches = st.integers(1, 8)
processes = st.integers(1, 5)


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


@pytest.mark.thorough
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
    steps = -(-23 // (2 * ranks.world_size))
    assert sum(len(batch) for result in results for batch in result["weighted"]) == 23
    for key in results[0].keys() - {"weighted"}:
        halves = [(result[key][:steps], result[key][steps:]) for result in results]
        first, second = zip(*halves, strict=True)
        for epoch in (first, second):
            assert sorted(sample for batches in epoch for batch in batches for sample in batch) == list(range(23))
        assert first != second


def batch_sampler() -> Any:
    recorder, model = Recorder(), float64_model()
    trainer = adamw_trainer(model, callbacks=[recorder])
    trainer.train(
        float64_data(11), 2, per_device_batch_size=2, train_dataloader_kwargs={"batch_sampler": LengthBuckets()}
    )
    return {"sizes": recorder.counts, "samples": trainer.progress.samples, "updates": trainer.progress.update}


def test_a_users_batch_sampler_is_divided_among_processes(ranks):
    results = ranks(batch_sampler)
    assert sum(size for result in results for size in result["sizes"]) == 22
    assert {result["samples"] for result in results} == {22}
    assert {result["updates"] for result in results} == {2 * -(-5 // ranks.world_size)}
    if ranks.world_size == 2:
        assert [result["sizes"][:3] for result in results] == [[3, 2, 1, 3, 2, 1], [1, 4, 1, 4]]
