"""Samplers, datasets and streams without a length, or with a wrong one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, Sampler

from pytorch_accel_lite import TrainerCallback, TrainerPlaceholderValues, callbacks
from pytorch_accel_lite.data import shard
from tests.datasets import Endless, Order
from tests.loaders import numbers, rank_of, samples
from tests.ranks import global_batch
from tests.ranks import rank as own_rank
from tests.small_models import (
    Rows,
    Stream,
    adamw_trainer,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_trainer,
    train,
)


class OrderWithoutEnd:
    """Draws from a generator that differs from rank to rank."""

    def __iter__(self):
        while True:
            yield random.randrange(50)


class EndlessOrder(Sampler):
    """An endless order, drawn from the generators of torch, numpy and python and its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.generator = torch.Generator()

    def __iter__(self):
        while True:
            own = torch.randint(self.size, (), generator=self.generator)
            yield int(own + torch.randint(9, ()) + np.random.randint(9) + random.randrange(9)) % self.size


@pytest.mark.sampled
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
@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_sampler_without_an_end_follows_from_seed_and_epoch(batched):
    size = 10 if batched else 50  # as many batches are drawn ahead as samples
    end, start_of_last = 48 * size, 22 * size + 3

    def read_indices(epoch, start, world_size=1, batch_size=size):
        def source(rank):
            if batched:
                return DataLoader(numbers(1000), batch_sampler=BatchSampler(EndlessOrder(1000), batch_size, False))
            return DataLoader(numbers(1000), batch_size, sampler=EndlessOrder(1000))

        by_rank = []
        for rank in range(world_size):
            loader = shard(source(rank), rank_of(rank, world_size), torch.device("cpu"), 3, True)
            by_rank.append(list(islice(loader.steps(epoch, start), end // batch_size // world_size)))
        return [i for step in zip(*by_rank, strict=True) for i in samples(step)]

    before = torch.get_rng_state()
    whole = read_indices(1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert read_indices(1, 0) == whole
    assert read_indices(2, 0) != whole
    assert read_indices(1, 0, world_size=2, batch_size=size // 2) == whole
    later = read_indices(1, start_of_last, batch_size=size * 2 // 5)
    assert later[: end - start_of_last] == whole[start_of_last:]


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


@pytest.mark.extension("streams", "progress_bar")
def test_data_without_an_end_need_a_limit_of_updates():
    from pytorch_accel_lite.callbacks import ProgressBarCallback

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


class Promises(Stream):
    """A stream whose length is not that of what it yields."""

    def __init__(self, length: int) -> None:
        super().__init__(8)
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.extension("streams")
@pytest.mark.parametrize(("length", "warns"), [(20, True), (8, False)])
def test_a_stream_that_is_shorter_than_its_length_is_warned_of(length, warns):
    message = "ended after 4 steps of this epoch, but their length is 10 steps"
    with pytest.warns(UserWarning, match=message) if warns else nullcontext():
        train(make_trainer(), train_dataset=Promises(length))
    train(make_trainer(), train_dataset=Promises(20), epochs=None, max_num_train_steps=3)


class Learns(Promises):
    """A stream that knows its length once it has been read."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.length = 8 if self.length == 20 else 20


@pytest.mark.extension("streams")
@pytest.mark.parametrize(("promised", "warns"), [(20, True), (8, False)])
def test_the_length_that_a_stream_had_before_its_epoch_counts(promised, warns, recwarn):
    train(make_trainer(), train_dataset=Learns(promised), epochs=1)
    said = [str(warning.message) for warning in recwarn]
    assert any("ended after 4 steps of this epoch" in text for text in said) == warns


@pytest.mark.extension("streams")
def test_a_length_that_is_not_implemented_is_unknown():
    class Unknown(Stream):
        def __len__(self):
            raise NotImplementedError

    trainer = make_trainer()
    trainer.train(Unknown(6), 2, per_device_batch_size=2)
    assert trainer.progress.update == 6
