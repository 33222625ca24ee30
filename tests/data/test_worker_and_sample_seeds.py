"""Random numbers of samples: with a seed, workers, processes and starting points change nothing."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytorch_accel_lite.data import shard
from tests.datasets import Noisy
from tests.launching import two_are_enough
from tests.loaders import rank_of
from tests.ranks import global_batch
from tests.small_models import (
    Rows,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    weights,
)


class NoisyRows(Rows):
    """Augmentation with all three generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(5) + np.random.randn() + random.random(), y


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


class AtFirstUse:
    """Makes its generator when it is called first, as transformers' collator for language models does."""

    def __init__(self) -> None:
        self.generator: np.random.Generator | None = None

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            self.generator = np.random.default_rng(4)
        return torch.cat([sample, torch.tensor([self.generator.random()])])


OF_A_DEFAULT = np.random.default_rng(1)


def scaled(sample: torch.Tensor, scale: float = 1.0, generator: np.random.Generator = OF_A_DEFAULT) -> Any:
    return torch.cat([sample, torch.tensor([generator.random() * scale])])


def added(scale: float, generator: np.random.Generator, sample: torch.Tensor) -> torch.Tensor:
    return torch.cat([sample, torch.tensor([generator.random() * scale])])


class Pipeline(Rows):
    """Applies a function, and holds something else."""

    def __init__(self, apply: Any, *others: Any) -> None:
        super().__init__(float64_data(16))
        self.apply, self.others = apply, others

    def __getitem__(self, index: int) -> torch.Tensor:
        found: torch.Tensor = self.apply(super().__getitem__(index)[0])
        return found


class InPairs:
    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return next(part for pair in self.pairs for part in pair if isinstance(part, Jitter))(sample)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: Pipeline(AtFirstUse()),
        lambda: Pipeline(InPairs([("name", Jitter())])),
        lambda: Pipeline(InPairs([(Jitter(), 0.5)])),
        lambda: Pipeline(InPairs([[None, Jitter()]])),
        lambda: Pipeline(scaled),
        lambda: Pipeline(partial(added, 0.5, np.random.default_rng(2))),
        lambda: Pipeline(Jitter(), nn.Sequential(*(nn.Linear(1, 1) for _ in range(900)))),
    ],
    ids=["at first use", "named", "with a probability", "after None", "default", "partial", "beside a large model"],
)
def test_generators_are_found_wherever_a_dataset_holds_them(make):
    def read(start: int = 0, workers: int = 0) -> torch.Tensor:
        loader = shard(DataLoader(make(), 4, num_workers=workers), rank_of(0, 1), torch.device("cpu"), 1, training=True)
        return torch.cat([loaded.data for loaded in loader.steps(1, start)])

    first = read()
    assert torch.equal(read(workers=2), first)
    assert torch.equal(read(start=8), first[8:])
    assert len(first[:, -1].unique()) == 16


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
