"""Samplers and streams with generators or states of their own, resumed at and within epochs."""

from __future__ import annotations

import random
import warnings
from functools import partial
from itertools import product, starmap
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import OwnShard
from tests.launching import SOAK, only_with_soak, some_of
from tests.ranks import shared_folder

SIZE = 24
X = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0))


class Rows(Dataset[Any]):
    def __init__(self, transform=lambda x: x):
        self.transform = transform

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.transform(X[index])


class OwnStream(IterableDataset[Any]):
    """Draws its order and noise from its own generator."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def __iter__(self):
        for index in self.rng.permutation(SIZE):
            yield X[index] + self.rng.normal() / 10


class Returns(IterableDataset[Any]):
    """The same, and returns to a position in an order."""

    def __init__(self):
        self.rng, self.at, self.first = random.Random(5), 0, 0

    def __iter__(self):
        order = self.rng.sample(range(SIZE), SIZE)
        first, self.first = self.first, 0
        for self.at in range(first, SIZE):
            yield X[order[self.at]]

    def state_dict(self):
        return {"at": self.at + 1}

    def load_state_dict(self, state):
        self.first = state["at"]


class OwnBatches:
    """Ready batches, and loaders inside an iterable."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.loader = DataLoader(TensorDataset(X), 4, sampler=RandomSampler(X, generator=generator))
        self.rng = np.random.RandomState(5)

    def __iter__(self):
        for (x,) in self.loader:
            yield x + float(self.rng.normal()) / 10


class InPlace(Sampler[int]):
    """Shuffles the order of the previous epoch, as bucket samplers do."""

    def __init__(self):
        self.order = np.arange(SIZE)

    def __len__(self):
        return SIZE

    def __iter__(self):
        np.random.shuffle(self.order)
        return iter(self.order.tolist())


class Counts(InPlace):
    """Depends on how often it was read, with or without a state."""

    def __init__(self):
        self.times = 0

    def __iter__(self):
        self.times += 1
        return iter(np.random.default_rng(self.times).permutation(SIZE).tolist())


class CountsAndReports(Counts):
    def state_dict(self):
        return {"times": self.times}

    def load_state_dict(self, state):
        self.times = state["times"]


class OwnSampler(InPlace):
    def __init__(self):
        self.rng = random.Random(3)

    def __iter__(self):
        return iter(self.rng.sample(range(SIZE), SIZE))


RNG = np.random.default_rng(9)


def with_closure() -> Any:
    rng = np.random.default_rng(3)
    return lambda x: x + rng.normal() / 10


def add(rng, x):
    return x + rng.random() / 10


def use_global(x):
    return x + RNG.normal() / 10


#: A dataset or a function that makes the loader, and arguments of the loader.
SOURCES: dict[str, Any] = {
    "stream": (OwnStream, dict),
    "stateful stream": (Returns, dict),
    "iterable": (lambda: OwnShard(OwnBatches()), None),
    "in place": (Rows, lambda: {"sampler": InPlace()}),
    "batches in place": (Rows, lambda: {"batch_sampler": BatchSampler(InPlace(), 4, False)}),
    "counts": (Rows, lambda: {"sampler": Counts()}),
    "reports": (Rows, lambda: {"sampler": CountsAndReports()}),
    "own generator": (Rows, lambda: {"sampler": OwnSampler()}),
    "closure": (lambda: Rows(with_closure()), dict),
    "partial": (lambda: Rows(partial(add, np.random.default_rng(1))), dict),
    "global": (lambda: Rows(use_global), dict),
}


def case(kind: str, *others: Any) -> Any:
    """The parameters of a test on a source."""
    is_read_in_turn = kind in ("stream", "stateful stream", "iterable")
    return pytest.param(kind, *others, marks=[pytest.mark.extension("streams")] * is_read_in_turn)


class InterruptedHere(Exception):
    pass


class Interrupt(TrainerCallback):
    """Saves a state and interrupts the run at an update or, if negative, at the end of an epoch."""

    def __init__(self, at, folder):
        self.at, self.folder = at, folder

    def configure_run(self, trainer, request, **kwargs):
        request.saves_training_states = True

    def on_train_step_checkpoint(self, trainer, **kwargs):
        self.stop(trainer, trainer.progress.update)

    def on_epoch_checkpoint(self, trainer, **kwargs):
        self.stop(trainer, -trainer.progress.epoch)

    def stop(self, trainer, at):
        if at == self.at:
            trainer.save_training_state(self.folder)
            raise InterruptedHere


class SourceTrainer(Trainer):
    batches: Any = None

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return super().create_train_dataloader(batch_size, train_dl_kwargs) if self.batches is None else self.batches

    def calculate_train_batch_loss(self, batch):
        return {"loss": (self.model(batch).square().mean() - 1) ** 2, "batch_size": len(batch)}


def train(kind: str, workers: int = 0, interrupted: Any = None, resume_from: Any = None, epochs: int = 3) -> Any:
    """The weights after some epochs."""
    make, arguments = SOURCES[kind]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    callbacks = [Interrupt(*interrupted)] if interrupted else []
    trainer = SourceTrainer(model, None, torch.optim.SGD(model.parameters(), lr=0.003), callbacks=callbacks, seed=3)
    data = make()
    kwargs = None
    if arguments is None:
        trainer.batches = data
    else:
        kwargs = {"num_workers": workers, **arguments()}
    try:
        trainer.train(data, epochs, per_device_batch_size=4, train_dataloader_kwargs=kwargs, resume_from=resume_from)
    except InterruptedHere:
        return None
    return trainer.get_model().weight.detach().clone()


def resumed(kind: str, at: int, folder: Any, workers: int = 0, epochs: int = 3) -> Any:
    train(kind, workers, (at, folder), epochs=epochs)
    RNG.random(7)  # of another process
    return train(kind, workers, resume_from=folder, epochs=epochs)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [*map(case, SOURCES)])
def test_own_generators_and_stateful_samplers_resume_exactly(tmp_path, kind):
    whole = train(kind)
    for at in (-1, -2, 9):  # the ends of epochs, the middle of the second one
        assert torch.equal(resumed(kind, at, tmp_path / str(at)), whole), at


WITH_WORKERS = [
    "in place",
    pytest.param("closure", marks=pytest.mark.thorough),
    pytest.param("stream", marks=[pytest.mark.extension("streams"), pytest.mark.thorough]),
]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_sources_with_workers_resume_exactly(tmp_path, kind):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gives the same batch to two workers")
        whole = train(kind, workers=2)
        for at in (-2, 9):
            assert torch.equal(resumed(kind, at, tmp_path / str(at), workers=2), whole), at


EPOCHS = 6 if SOAK else 2
EVERYWHERE = (*range(-5, 0), *range(1, 36, 3)) if SOAK else (-1, 8)  # ends of epochs, and updates


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "workers"), some_of(starmap(case, product(SOURCES, [0, 2]))))
def test_each_source_resumes_exactly_from_everywhere(tmp_path, kind, workers):
    if kind == "stateful stream" and workers:
        pytest.skip("a DataLoader does not report the states of its workers")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gives the same batch to two workers")
        whole = train(kind, workers, epochs=EPOCHS)
        for at in EVERYWHERE:
            assert torch.equal(resumed(kind, at, tmp_path / str(at), workers, epochs=EPOCHS), whole), at


def interrupted_on_ranks() -> Any:
    results = {}
    with shared_folder() as folder:
        for kind in ("stream", "iterable", "in place", "own generator", "global"):
            whole = train(kind)
            ends = {at: resumed(kind, at, folder / f"{kind} {at}") for at in (-2, 4)}
            results[kind] = {at: torch.equal(weights, whole) for at, weights in ends.items()}
    return results


@pytest.mark.extension("streams")
@only_with_soak
@pytest.mark.processes
def test_own_generators_and_stateful_samplers_resume_on_ranks(two_ranks):
    for result in two_ranks(interrupted_on_ranks):
        assert all(all(ends.values()) for ends in result.values()), result


class ShufflesInPlace(IterableDataset[Any]):
    def __init__(self):
        self.order = list(range(SIZE))

    def __iter__(self):
        random.shuffle(self.order)
        return (X[index] for index in self.order)


class Remembers(InPlace):
    """Differs in every process."""

    number = 0

    def __iter__(self):
        Remembers.number += 1
        return iter(np.random.default_rng(Remembers.number).permutation(SIZE).tolist())


@pytest.mark.extension("streams")
@pytest.mark.parametrize("at", [-2, 9])
def test_streams_that_cannot_be_repeated_are_warned_of(tmp_path, monkeypatch, at):
    monkeypatch.setitem(SOURCES, "lost", (ShufflesInPlace, dict))
    train("lost", interrupted=(at, tmp_path / "stream"))
    with pytest.warns(UserWarning, match="The training data, a ShufflesInPlace, give other batches than when the"):
        assert train("lost", resume_from=tmp_path / "stream") is not None


@pytest.mark.parametrize("at", [-2, 9])
def test_samplers_that_cannot_be_repeated_are_warned_of(tmp_path, monkeypatch, at):
    monkeypatch.setitem(SOURCES, "lost", (Rows, lambda: {"sampler": Remembers()}))
    train("lost", interrupted=(at, tmp_path / "sampler"))
    with pytest.warns(UserWarning, match="The sampler Remembers now gives another order for epoch 2 than when the"):
        assert train("lost", resume_from=tmp_path / "sampler") is not None


@pytest.mark.extension("streams")
def test_one_shot_iterators_are_warned_of_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SOURCES, "once", (lambda: OwnShard(iter([X] * 9)), None))
    train("once", interrupted=(2, tmp_path / "state"), epochs=1)
    said = capsys.readouterr().out
    assert "the resumed one will not see the same training data" in said
    assert "list_iterator is an iterator, which gives each batch once and cannot begin again" in said
