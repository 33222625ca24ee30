"""Streams that report where they are, on one process or several."""

from __future__ import annotations

import random
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import MixtureStream, OwnShard, ReadByAll, ShuffledStream, shard
from pytorch_accel_lite.distributed import Ranks
from tests.cases.common import rank, world_size
from tests.cases.data import Reading, SavesEachUpdate
from tests.tasks import listener, weights


class Shelf(IterableDataset):
    """Numbers with noise; reports the next one, and keeps those it has read."""

    def __init__(self, numbers):
        self.numbers = list(numbers)
        self.read = []
        self.next = self.first = 0

    def __iter__(self):
        self.next, self.first = self.first, 0
        while self.next < len(self.numbers):
            number = self.numbers[self.next]
            self.next += 1
            self.read.append(number)
            yield torch.stack([torch.tensor(float(number)), torch.rand(())])

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.first = state["next"]


class Forgetful(Shelf):
    """The same, without a state."""

    state_dict = None


class Cut(Shelf):
    """Numbers of which each process may read its own."""

    def shard(self, rank, world_size):
        part = type(self)(self.numbers[rank::world_size])
        part.read = self.read
        return part


class ForgetfulCut(Cut):
    """The same, without a state."""

    state_dict = None


SHELVES = {"shelf": Shelf, "forgetful": Forgetful, "own part": Shelf, "cut": Cut, "forgetful cut": ForgetfulCut}


def hugging_face(size: int, read: list[int], num_shards: int = 3) -> Any:
    from datasets import Dataset

    def note(row):
        read.append(row["x"])
        return row

    return Dataset.from_dict({"x": list(range(size))}).to_iterable_dataset(num_shards=num_shards).map(note)


def rows(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([[float(row["x"]), 0.0] for row in samples])


def rows_or_tensors(samples: list[Any]) -> torch.Tensor:
    return rows(samples) if isinstance(samples[0], dict) else torch.stack(samples)


def source(kind: str, size: int, read: list[int]) -> tuple[Any, dict[str, Any]]:
    """A stream, and the arguments of its loader."""
    if kind in SHELVES:
        numbers = range(size) if kind != "own part" else range(rank(), size - (rank() > 0), world_size())
        stream = SHELVES[kind](numbers)
        stream.read = read
        return stream, {}
    if kind.startswith("all of "):
        stream, kwargs = source(kind.removeprefix("all of "), size, read)
        return ReadByAll(stream), kwargs
    if kind == "stacked shelf":
        return source("shelf", size, read)[0], {"collate_fn": torch.stack}
    if kind == "mixture of cut":
        streams = {"a": Cut(range(size)), "b": ForgetfulCut(range(100, 100 + size))}
        streams["a"].read = streams["b"].read = read
        return MixtureStream(streams, repeat=False), {}
    if kind.startswith("blocks of "):
        return ShuffledStream(source(kind.removeprefix("blocks of "), size, read)[0], 7), {
            "collate_fn": rows_or_tensors
        }
    if kind == "mixture":
        streams = {"shelf": Shelf(range(size)), "forgetful": Forgetful(range(100, 105))}
        streams["shelf"].read = streams["forgetful"].read = read
        return MixtureStream(streams, {"shelf": 2, "forgetful": 1}), {}
    if kind == "mixture of others":
        return MixtureStream({"a": Shelf(range(size))}, repeat=False), {}
    if kind == "mixture of shuffled":
        streams = {name: hugging_face(size, read).shuffle(seed=1, buffer_size=4) for name in "ab"}
        return MixtureStream(streams, repeat=False), {"collate_fn": rows}
    stream = hugging_face(size, read)
    if kind == "shuffled":
        stream = stream.shuffle(seed=1, buffer_size=4)
    if kind == "six shards":
        stream = hugging_face(size, read, 6)
    if kind == "split":
        from datasets.distributed import split_dataset_by_node

        stream = split_dataset_by_node(hugging_face(size, read, 6), rank(), world_size())
    workers = 2 if kind in ("workers", "plain workers") else 0
    return stream, {"collate_fn": rows, "num_workers": workers}


class Note:
    """Something in a batch that is not a tensor, but holds one."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __eq__(self, other):
        return torch.equal(self.tensor, other.tensor)


class Mixed(IterableDataset):
    """Batches of all kinds of values, of which no two have the same size."""

    def __len__(self):
        return 7

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for number in range(7):
            x = torch.rand(2 + number % 3, 5 * number + 1, generator=generator, dtype=torch.float64)
            yield {
                "x": x.mT.contiguous().mT[:, : number + 1],
                "names": ["a" * number, "b"],
                "note": Note(x.sum()),
                "half": x.bfloat16(),
                "mask": x > 0.5,
                "none": torch.empty(2, 0),
                "sparse": torch.eye(number + 1).to_sparse(),
                "rows": x.numpy(),
            }


def dealt_batches() -> Any:
    """What each process is dealt in an epoch of training and one of evaluation, of each kind of batches."""
    found = {}
    loader = DataLoader(Mixed(), None)
    for training in (True, False):
        loaded = shard(loader, Ranks(Accelerator(cpu=True)), torch.device("cpu"), seed=None, training=training)
        found[training] = [*loaded.steps(1)]
    largest = [
        [x.untyped_storage().nbytes() / max(x.nbytes, 1) for x in (b.data["x"], b.data["note"].tensor)]
        for b in found[True]
    ]
    return found, largest


class Fails(IterableDataset):
    """Numbers, after some of which reading fails."""

    def __init__(self, numbers, good):
        self.numbers, self.good = numbers, good

    def __iter__(self):
        for number in self.numbers:
            if number == self.good:
                raise OSError(f"no number {number}")
            yield torch.tensor([float(number), 0.0])

    def shard(self, rank, world_size):
        return Fails(self.numbers[rank::world_size], self.good)


class CannotBeOpened(IterableDataset):
    """Data that fail on the second process before the first sample."""

    def __iter__(self):
        if rank() == 1:
            raise OSError("no file")
        return iter(torch.ones(6, 2))


def failing_streams() -> dict[str, Any]:
    """How many steps there are, and what is said, when one process cannot read."""
    found = {}
    all_numbers = [*range(24)]
    streams = {
        "dealt": DataLoader(Reading(Fails(all_numbers, 17)), 2),
        "dealt at once": DataLoader(Reading(Fails(all_numbers, 0)), 2),
        "divided": DataLoader(Fails(all_numbers, 17), 2),
        "own": OwnShard(DataLoader(Fails([*range(8)], 6 if rank() == 1 else None), 2)),
        "cannot be opened": OwnShard(DataLoader(CannotBeOpened(), 2)),
        "without samples": Reading([torch.ones(2, 2), torch.ones(0, 2), torch.ones(2, 2)]),
        "no batch at all": [[1, 2]] if rank() else [torch.ones(2, 2)],
        "different": DataLoader(ReadByAll(Fails([n + (n > 11) * rank() for n in all_numbers], None)), 2),
        "different lengths": DataLoader(ReadByAll(Fails(all_numbers[: 16 + 4 * rank()], None)), 2),
    }
    for name, stream in streams.items():
        model, keeps = nn.Linear(2, 1), Keeps()
        trainer = Sums(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=[keeps], seed=0)
        trainer.create_train_dataloader = lambda *_, stream=stream: stream
        with redirect_stdout(StringIO()):
            try:
                trainer.train(all_numbers, 1)
            except Exception as error:
                found[name] = len(keeps.seen), f"{type(error).__name__}: {error}"
    return found


class Counted:
    """Batches of two samples, without a length, of which some have been read."""

    def __init__(self, count, beside):
        self.count, self.beside, self.read = count, beside, 0

    def __iter__(self):
        for number in range(self.count):
            self.read += 1
            yield torch.full((2, 2), float(number)), self.beside


def read_ahead() -> dict[str, Any]:
    """How many batches have been read but not used after each step, of batches with something small or large inside."""
    found = {}
    beside = {
        "small": torch.zeros(4),
        "large": torch.zeros(()).expand(2**23),  # 32 MiB, if they were separate
        "sparse": torch.sparse_coo_tensor([[0], [0]], [1.0], (2**12, 2**12)),
    }

    class OwnBatches(Sums):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return self.train_dataset

        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss(batch[0])

    class Looks(Keeps):
        def on_train_step_end(self, trainer, batch, **kwargs):
            super().on_train_step_end(trainer, batch[0])
            ahead.append(batches.read - trainer.progress.step)

    for name, extra in beside.items():
        ahead: list[int] = []
        batches, looks = Counted(50 - 7 * rank(), extra), Looks()
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        OwnBatches(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=[looks]).train(batches, 1)
        found[name] = {"ahead": ahead, "seen": looks.seen, "weights": weights(model)}
    return found


def streams_within_streams() -> Any:
    """Streams of every kind are evaluated and predicted in the steps of another; the weights of a run on each."""
    found = {}

    class Looks(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            for name in ("shelf", "cut", "all of shelf"):
                stream, _ = source(name, 7, [])
                trainer.evaluate(stream, per_device_batch_size=2)
                predicted = trainer.predict(source(name, 5, [])[0], per_device_batch_size=2)
                assert torch.equal(predicted[:, 0], torch.arange(5.0))

    class Looked(Sums):
        def calculate_eval_batch_loss(self, batch):
            return self.calculate_train_batch_loss(batch)

        def calculate_predict_batch_output(self, batch):
            return batch

    for name in ("shelf", "cut", "all of shelf", "own part"):
        for callbacks in ([], [Looks()]):
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            trainer = Looked(model, None, optimizer, callbacks=callbacks, seed=5)
            trainer.own_part = name == "own part"
            with redirect_stdout(StringIO()):
                trainer.train(source(name, 13, [])[0], 2, per_device_batch_size=2, train_dataloader_kwargs={})
            found[name, bool(callbacks)] = weights(model)
    return found


class Keeps(TrainerCallback):
    """Keeps the batches of this process that count."""

    def __init__(self):
        self.seen = []

    def on_train_step_end(self, trainer, batch, **kwargs):
        if trainer.current_run.batch.num_samples != 0:
            self.seen.append(batch)


class Sums(Trainer):
    """Reads what it is told to."""

    loader_class: Any = DataLoader
    own_part = False

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        loader = self.loader_class(self.train_dataset, batch_size, **(train_dl_kwargs or {}))
        return OwnShard(loader) if self.own_part else loader

    def calculate_train_batch_loss(self, batch):
        return {"loss": self.model(batch).square().mean(), "batch_size": len(batch)}


class Draws(Sums):
    """Its steps draw random numbers."""

    def calculate_train_batch_loss(self, batch):
        self.log("numpy", np.random.rand())
        self.log("python", random.random())
        return super().calculate_train_batch_loss(batch)


def random_steps(kind: str, folder: Any = None, resume_from: Any = None) -> torch.Tensor:
    """The numbers that the steps of an epoch draw; states are saved in ``folder``, if given."""
    model, drawn = nn.Linear(2, 1), []
    keeping = listener(
        on_train_step_end=lambda trainer, **_: drawn.append([*map(float, trainer.step_metrics.values())])
    )
    callbacks = [keeping] if folder is None else [keeping, SavesEachUpdate(folder)]
    trainer = Draws(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=callbacks, seed=5)
    stream, kwargs = source(kind, 48, [])
    with redirect_stdout(StringIO()):
        trainer.train(stream, 1, per_device_batch_size=3, train_dataloader_kwargs=kwargs, resume_from=resume_from)
    return torch.tensor(drawn)


def train_on(kind: str, folder: Any = None, resume_from: Any = None, batch_size: int = 3, size: int = 26) -> Any:
    """Train two epochs on a stream; save a state at each update in ``folder``, or resume from one."""
    read: list[int] = []
    stream, kwargs = source(kind, size, read)
    torch.manual_seed(rank())
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.1)
    keeps = Keeps()
    callbacks: list[TrainerCallback] = [keeps] if folder is None else [keeps, SavesEachUpdate(folder)]
    trainer = Sums(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=callbacks, seed=5)
    if kind in ("loader", "workers"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        trainer.loader_class = StatefulDataLoader
    trainer.own_part = kind == "own part"
    length = {"max_num_train_steps": 14} if kind == "mixture" else {"num_epochs": 2}
    kwargs = {"train_dataloader_kwargs": kwargs, "resume_from": resume_from, **length}
    with redirect_stdout(StringIO()) as text:
        trainer.train(stream, per_device_batch_size=batch_size, **kwargs)
    return {"seen": keeps.seen, "read": read, "weights": weights(model), "printed": text.getvalue()}
