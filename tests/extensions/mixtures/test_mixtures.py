"""Mixtures: shares of several datasets, in the same order from any position on any processes and workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import Mixture, NamedDatasets, shard
from tests.loaders import numbers, rank_of
from tests.small_models import Stream, equal_weights, largest_difference, make_trainer, weights
from tests.streams import SavesEachUpdate


class Numbers(Dataset[Any]):
    """Numbers from ``first`` on, each with noise of its own."""

    def __init__(self, first, size, noise=1.0):
        self.first, self.size, self.noise = first, size, noise

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.stack([torch.tensor(float(self.first + index)), self.noise * torch.rand(())]).double()


def mixture(noise: float = 1.0, **kwargs: Any) -> Mixture:
    return Mixture({"a": Numbers(0, 10, noise), "b": Numbers(100, 25, noise)}, **kwargs)


KIND = {"weights": {"a": 0.7, "b": 0.3}}


class Keeps(TrainerCallback):
    """Keeps the samples of each step."""

    saves_attributes = False  # those of a run alone

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_step_end(self, trainer, batch, **kwargs):
        indices = trainer.batch_indices
        self.seen.append(batch[: len(indices)])
        data = trainer.train_dataset
        assert [data.name_of(index) for index in indices] == ["ab"[int(x) // 100] for x in self.seen[-1][:, 0]]


class Sums(Trainer):
    def calculate_train_batch_loss(self, batch):
        return {"loss": self.model(batch).square().mean(), "batch_size": len(batch)}

    def calculate_eval_batch_loss(self, batch):
        return {"loss": batch[:, 0].sum(), "batch_size": len(batch)}


def epoch_of(data: Mixture, batch_size: int, world_size: int = 1, start: int = 0, epoch: int = 1) -> list[Any]:
    """The steps of an epoch, each with what every rank was given."""
    by_rank = []
    for rank in range(world_size):
        source = DataLoader(data, **data.loader_kwargs(batch_size))
        loader = shard(source, rank_of(rank, world_size), torch.device("cpu"), seed=3, training=True)
        by_rank.append(list(loader.steps(epoch, start)))
    return [*zip(*by_rank, strict=True)]


def indices(steps: Any) -> list[int]:
    return [index for step in steps for batch in step for index in batch.indices]


def of_sizes(*sizes: int, **kwargs: Any) -> Mixture:
    return Mixture({f"d{size}": numbers(size) for size in dict.fromkeys(sizes)}, **kwargs)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4, unique=True), st.data())
def test_every_part_of_an_epoch_has_the_shares_of_the_weights(sizes, data):
    weights = data.draw(st.lists(st.floats(0.1, 5), min_size=len(sizes), max_size=len(sizes)))
    named = dict(zip((f"d{size}" for size in sizes), weights, strict=True))
    whole = of_sizes(*sizes, weights=named, num_samples=100)
    for name, count in whole.samples_per_epoch.items():
        assert abs(count - 100 * named[name] / sum(weights)) < len(sizes)
    order = indices(epoch_of(whole, 5))
    assert len(order) == 100
    found: Counter[str] = Counter()
    for done, index in enumerate(order, 1):
        found[whole.name_of(index)] += 1
        for name, count in whole.samples_per_epoch.items():
            assert abs(found[name] - done * count / 100) < len(sizes)


def test_no_sample_of_a_mixture_repeats_before_all_are_read():
    whole = of_sizes(7, 30, weights={"d7": 1, "d30": 1}, num_samples=20)
    order = [index for epoch in (1, 2, 3) for index in indices(epoch_of(whole, 4, epoch=epoch))]
    small, large = [i for i in order if i < 7], [i for i in order if i >= 7]
    assert len(small) == len(large) == 30
    passes = [small[i : i + 7] for i in range(0, 28, 7)]
    assert [sorted(one) for one in passes] == [[*range(7)]] * 4
    assert len({tuple(one) for one in passes}) == 4  # each in an order of its own
    assert sorted(large) == [*range(7, 37)]


def test_without_weights_an_epoch_has_each_sample_once():
    assert sorted(indices(epoch_of(of_sizes(7, 30, 2), 4))) == [*range(39)]


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.data())
def test_a_mixed_epoch_continues_from_any_position(batch, world, batch2, world2, data):
    whole = of_sizes(7, 30, weights={"d7": 2, "d30": 1})
    steps = epoch_of(whole, batch, world)
    done = indices(steps[: data.draw(st.integers(0, len(steps)))])
    assert done + indices(epoch_of(whole, batch2, world2, len(done))) == indices(epoch_of(whole, 1))


def train_mixture(
    folder: Any = None, batch_size: int = 3, epochs: int = 2, seed: int | None = 5, noise: float = 1.0, **kwargs: Any
) -> Any:
    """Train on a mixture; save a state at each update in ``folder``."""
    model = nn.Linear(2, 1).double()
    nn.init.constant_(model.weight, 0.01)
    nn.init.zeros_(model.bias)
    keeps = Keeps()
    callbacks = [keeps] if folder is None else [keeps, SavesEachUpdate(folder)]
    trainer = Sums(model, None, torch.optim.SGD(model.parameters(), lr=1e-5), callbacks=callbacks, seed=seed)
    kwargs = {"train_dataloader_kwargs": {"num_workers": 0}} | kwargs
    trainer.train(mixture(noise, **KIND), epochs, per_device_batch_size=batch_size, **kwargs)
    return {"seen": keeps.seen, "weights": weights(model), "history": trainer.run_history.to_dict()}


@pytest.mark.slow
def test_an_interrupted_mixture_ends_with_the_same_bits(tmp_path):
    whole = train_mixture(tmp_path)
    steps = len(whole["seen"])
    for update, workers in ((1, 0), (steps // 2 - 1, 2), (steps // 2, 0), (steps - 1, 0)):
        state, kwargs = tmp_path / f"{update}", {"train_dataloader_kwargs": {"num_workers": workers}}
        resumed = train_mixture(resume_from=state, **kwargs)
        assert equal_weights(resumed["weights"], whole["weights"])
        assert all(map(torch.equal, resumed["seen"], whole["seen"][update:]))
        assert resumed["history"] == whole["history"]


def test_a_mixture_without_a_seed_follows_from_torchs_generator():
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append([batch[:, 0].tolist() for batch in train_mixture(seed=None)["seen"]])
    assert found[0] == found[1] != found[2]
    small = [x for batch in found[0] for x in batch if x < 100]
    assert sorted(small[:10]) == sorted(small[10:20]) == [*range(10)]


def test_evaluation_reads_every_sample_once_in_order():
    data = mixture(noise=0, **KIND)
    trainer = make_trainer(model=torch.nn.Linear(2, 1), trainer_class=Sums, loss_func=None)
    for kwargs in ({}, {"shuffle": False}):
        metrics = trainer.evaluate(data, per_device_batch_size=35, dataloader_kwargs={"num_workers": 0} | kwargs)
        assert metrics["evaluation_loss"] == sum(range(10)) + sum(range(100, 125))


@pytest.mark.parametrize(
    ("loader", "sizes"),
    [
        ({"batch_size": 12}, [12, 12, 11]),
        ({"batch_size": 12, "drop_last": True}, [12, 12]),
        ({"batch_sampler": [[0, 1, 2], [30]]}, [3, 1]),
        ({"sampler": [0, 1, 2, 3]}, [3, 1]),
    ],
)
def test_the_arguments_of_the_loader_hold_for_mixtures(loader, sizes):
    result = train_mixture(epochs=1, train_dataloader_kwargs={"num_workers": 0} | loader)
    assert sorted(map(len, result["seen"])) == sorted(sizes)


def test_a_mixture_in_order_reads_each_dataset_in_order():
    result = train_mixture(epochs=1, train_dataloader_kwargs={"num_workers": 0, "shuffle": False})
    seen = [int(x) for batch in result["seen"] for x in batch[:, 0]]
    assert [x for x in seen if x < 100] == [x % 10 for x in range(len([x for x in seen if x < 100]))]
    assert [x for x in seen if x >= 100] == [*range(100, 100 + len([x for x in seen if x >= 100]))]


rows = TensorDataset(torch.zeros(3))


@pytest.mark.parametrize(
    ("datasets", "kwargs", "error", "message"),
    [
        ({}, {}, ValueError, "must have at least one"),
        ([rows], {}, TypeError, r"in a dict by name, not list"),
        ({"a": rows, "b": Stream()}, {}, ValueError, r"'b' \(Stream\) cannot be indexed .* MixtureStream"),
        ({"a": TensorDataset(torch.zeros(0))}, {}, ValueError, "'a' is empty"),
        ({"a": rows}, {"weights": {"a": 1, "c": 1}}, ValueError, "has 'c', which is not one of the datasets 'a'"),
        ({"train": rows}, {"weights": {"trian": 1}}, ValueError, "Did you mean 'train'"),
        ({"a": rows, "b": rows}, {"weights": {"a": 1}}, ValueError, "weights has nothing for the dataset 'b'"),
        ({"a": rows}, {"weights": {"a": 0}}, ValueError, r"weights\['a'\]=0 must be greater than 0"),
        ({"a": rows}, {"weights": {"a": float("nan")}}, ValueError, r"weights\['a'\]=nan must be"),
        ({"a": rows}, {"weights": {"a": "0.5"}}, TypeError, r"weights\['a'\]='0.5' must be a number"),
        ({"a": rows}, {"weights": [0.5]}, TypeError, r"weights must be a dict .* by name of the dataset, not list"),
        ({"a": rows}, {"num_samples": 0}, ValueError, "num_samples=0 must be at least 1"),
        ({"a": rows, "b": rows}, {"weights": {"a": 1, "b": 1e-6}}, ValueError, "'b' has so small a weight that none"),
    ],
)
def test_mixtures_refuse_bad_datasets_and_weights(datasets, kwargs, error, message):
    with pytest.raises(error, match=message):
        Mixture(datasets, **kwargs)


class OfWeights(Trainer):
    """Takes any batch."""

    def calculate_train_batch_loss(self, batch):
        return {"loss": self.model.weight.square().mean(), "batch_size": 1}


def test_weights_that_have_no_effect_are_warned_of():
    uneven, even = mixture(weights={"a": 1, "b": 1}), mixture()
    for data, how in [
        (DataLoader(uneven, 20, shuffle=True), "by a sampler of torch"),
        (Subset(uneven, range(8)), "inside a Subset"),
        (NamedDatasets({"c": mixture(num_samples=4)}), "inside a NamedDatasets"),
    ]:
        with pytest.warns(UserWarning, match=f"samples in an epoch.* is read {how}, so its weights"):
            train_briefly(data)
    in_order = BatchSampler(uneven.create_training_sampler(), 20, drop_last=False)
    for data in (
        Subset(even, range(8)),
        DataLoader(even, 20, shuffle=True),
        DataLoader(uneven, **uneven.loader_kwargs(20)),
        DataLoader(uneven, batch_sampler=in_order),
    ):
        train_briefly(data)


def train_briefly(data: Any) -> None:
    model = nn.Linear(2, 1)
    trainer = OfWeights(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    trainer.train(
        data,
        max_num_train_steps=1,
        train_dataloader_kwargs=None if isinstance(data, DataLoader) else {"num_workers": 0},
    )


@pytest.mark.processes
@pytest.mark.parametrize("seed", [5, None])
def test_mixtures_on_several_processes_give_the_batches_of_one(ranks, seed):
    results = ranks.run(train_mixture, batch_size=12 // ranks.world_size, seed=seed, noise=0.0)
    steps = [torch.cat(step) for step in zip(*(result["seen"] for result in results), strict=True)]
    if seed is None:
        small = [int(x) for step in steps for x in step[:, 0] if x < 100]
        assert sorted(small[:10]) == sorted(small[10:20]) == [*range(10)]
        return
    alone = train_mixture(batch_size=12, noise=0.0)
    assert all(map(torch.equal, steps, alone["seen"]))
    for result in results:
        assert largest_difference(result["weights"], alone["weights"]) < 1e-12
        for name, values in alone["history"].items():
            assert result["history"][name] == pytest.approx(values, abs=1e-10)


@pytest.mark.processes
def test_a_mixture_resumes_with_other_processes(two_ranks, tmp_path):
    whole = train_mixture(tmp_path)
    done = Counter(int(x) for batch in whole["seen"][:9] for x in batch[:, 0])
    rest = two_ranks.run(train_mixture, resume_from=tmp_path / "9")
    seen = Counter(int(x) for result in rest for batch in result["seen"] for x in batch[:, 0])
    assert done + seen == Counter(int(x) for batch in whole["seen"] for x in batch[:, 0])
