"""Streams with and without a saved position, and data in a different order on each process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite import Trainer, TrainerCallback, data
from pytorch_accel_lite.data import OwnShard
from tests.ranks import rank as own_rank
from tests.ranks import world_size
from tests.small_models import float64_data, weights

BATCHES = 9  # in an epoch of 26 samples, see train_on()


class Shelf(IterableDataset):
    """A stream of numbers with noise that reports its position and records the numbers read."""

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


class Rewinding(Shelf):
    """A ``Shelf`` that is at its start again as soon as it ends, also by its state."""

    def __iter__(self):
        yield from super().__iter__()
        self.next = 0


class Forgetful(Shelf):
    """A ``Shelf`` without a state."""

    state_dict = None


class Cut(Shelf):
    """A stream of numbers that can be divided among processes."""

    def shard(self, rank, world_size):
        part = type(self)(self.numbers[rank::world_size])
        part.read = self.read
        return part


class ForgetfulCut(Cut):
    """A ``Cut`` without a state."""

    state_dict = None


class ForItsLoader(Shelf):
    """Like the streams of litdata and MosaicML, whose own loaders report how much has been read."""

    def state_dict(self, num_samples):
        raise NotImplementedError("only its loader calls it")


SHELVES = {
    "shelf": Shelf,
    "rewinding": Rewinding,
    "forgetful": Forgetful,
    "for its loader": ForItsLoader,
    "own part": Shelf,
    "cut": Cut,
    "forgetful cut": ForgetfulCut,
}


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


def shuffled(stream: Any, *args: Any) -> Any:
    """A stream shuffled in blocks. Tests of the core that use it are marked with the extension ``shuffled_streams``."""
    return data.ShuffledStream(stream, *args)


def mixed(streams: Any, *args: Any, **kwargs: Any) -> Any:
    """A mixture of streams. Tests of the core that use it are marked with the extension ``mixtures``."""
    return data.MixtureStream(streams, *args, **kwargs)


def source(kind: str, size: int, read: list[int]) -> tuple[Any, dict[str, Any]]:
    """A stream, and the arguments of its loader."""
    if kind in SHELVES:
        numbers = range(size) if kind != "own part" else range(own_rank(), size - (own_rank() > 0), world_size())
        stream = SHELVES[kind](numbers)
        stream.read = read
        return stream, {}
    if kind == "mixture of cut":
        streams = {"a": Cut(range(size)), "b": ForgetfulCut(range(100, 100 + size))}
        streams["a"].read = streams["b"].read = read
        return mixed(streams, repeat=False), {}
    if kind.startswith("blocks of "):
        return shuffled(source(kind.removeprefix("blocks of "), size, read)[0], 7), {"collate_fn": rows_or_tensors}
    if kind == "mixture":
        streams = {"shelf": Shelf(range(size)), "forgetful": Forgetful(range(100, 105))}
        streams["shelf"].read = streams["forgetful"].read = read
        return mixed(streams, {"shelf": 2, "forgetful": 1}), {}
    if kind == "mixture of others":
        return mixed({"a": Shelf(range(size))}, repeat=False), {}
    if kind == "mixture of shuffled":
        streams = {name: hugging_face(size, read).shuffle(seed=1, buffer_size=4) for name in "ab"}
        return mixed(streams, repeat=False), {"collate_fn": rows}
    stream = hugging_face(size, read)
    if kind == "shuffled":
        stream = stream.shuffle(seed=1, buffer_size=4)
    if kind == "six shards":
        stream = hugging_face(size, read, 6)
    if kind == "split":
        from datasets.distributed import split_dataset_by_node

        stream = split_dataset_by_node(hugging_face(size, read, 6), own_rank(), world_size())
    workers = 2 if kind in ("workers", "plain workers") else 0
    return stream, {"collate_fn": rows, "num_workers": workers}


class Keeps(TrainerCallback):
    """Records the batches of this process, without fillers."""

    saves_attributes = False  # those of a run alone

    def __init__(self) -> None:
        self.seen: list[Any] = []

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


def require(kind: str) -> None:
    """Skip a test of a kind of stream that the installed libraries do not have, or not well enough."""
    if kind != "shelf":
        pytest.importorskip("datasets")
    if kind not in ("shelf", "shuffled") and int(version("datasets").partition(".")[0]) < 5:
        pytest.skip("datasets before 5.0 skips samples when it returns to a position, so it is read again")
    if kind in ("loader", "workers"):
        pytest.importorskip("torchdata.stateful_dataloader")


def train_on(
    kind: str,
    folder: Any = None,
    resume_from: Any = None,
    batch_size: int = 3,
    size: int = 26,
    callbacks: Sequence[TrainerCallback] = (),
) -> Any:
    """Train two epochs on a stream; save a state at each update in ``folder``, or resume from one."""
    read: list[int] = []
    stream, kwargs = source(kind, size, read)
    torch.manual_seed(own_rank())
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.1)
    keeps = Keeps()
    callbacks = [keeps, *callbacks, *([] if folder is None else [SavesEachUpdate(folder)])]
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


class ShuffledSamples(IterableDataset):
    def __init__(self, size):
        self.data = float64_data(size)

    def __iter__(self):
        order = list(range(len(self.data)))
        random.shuffle(order)  # differs from rank to rank
        return (self.data[index] for index in order)


class SavesEachUpdate(TrainerCallback):
    def __init__(self, folder):
        self.folder = folder

    def configure_run(self, trainer, request, **kwargs):
        request.saves_training_states = True

    def on_train_step_checkpoint(self, trainer, **kwargs):
        trainer.save_training_state(self.folder / str(trainer.progress.update))


class LengthBuckets:
    """A batch sampler with batches of different sizes."""

    def __iter__(self):
        yield from ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])

    def __len__(self):
        return 5
