"""The data that users pass: their types, those of the batches read from them, and of what steps return for these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol, TypeAlias, TypeGuard

from torch.utils.data import DataLoader, Dataset

from pytorch_accel_lite.base.types import Tree

#: A dataset, a stream or a loader, from torch, another library or the user.
Source: TypeAlias = Any
#: A sampler of indices, or of batches of indices, from torch, another library or the user.
SamplerLike: TypeAlias = Any
#: The index of a sample in a dataset: a number, or anything that a user's sampler yields.
Index: TypeAlias = Any
#: A sample of a dataset: what the user's dataset returns for an index.
Sample: TypeAlias = Any
#: A batch, as the user's dataset and collate function make it: what a loader yields and a step gets.
BatchData: TypeAlias = Tree
#: What a step returns for a batch: its loss, the outputs of the model and other values, by name.
BatchOutput: TypeAlias = dict[str, Any]
#: Makes a batch from a list of samples.
CollateFunction: TypeAlias = Callable[[list[Sample]], BatchData]
#: The state of a source or a loader for training states, in plain values, such as a position.
SourceState: TypeAlias = Any


class IndexedData(Protocol):
    """Data with a length and an element for each sample: a list, an array, a dataset from another library."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index, /) -> Sample: ...


class OwnShard:
    """Marks batches as this process's own, for data of which every process already reads a different part.

    Pass it in place of a dataset, or return it from ``create_train_dataloader``, for example for a ``DataLoader`` over
    an ``IterableDataset`` that shards itself, or for a list of ready batches.

    If that method returns anything but a ``torch.utils.data.DataLoader``, or returns a subclass that overrides
    ``__iter__``, the batches are assumed to be already sharded. Without this mark, a message says so.
    """

    def __init__(self, batches: Iterable[BatchData]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[BatchData]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class TrainingOrder(ABC):
    """Base of datasets that a trainer reads in an order of their own in training, but as usual otherwise."""

    @abstractmethod
    def create_training_sampler(self, shuffle: bool = True) -> SamplerLike:
        """Return the sampler of a training epoch."""


#: What a trainer reads: a dataset, a ``DataLoader`` or ``OwnShard``, or anything with an element for each sample.
Data = Dataset[Sample] | DataLoader[Sample] | OwnShard | IndexedData
#: Data, or several data by name.
NamedData = Data | Mapping[str, Data]


def is_named(data: object) -> TypeGuard[Mapping[str, Source]]:
    """Whether data are several data by name: a dict, or another mapping of names that is no dataset itself."""
    if isinstance(data, Mapping) and not isinstance(data, (dict, Dataset)):
        return all(isinstance(name, str) for name in data)
    return isinstance(data, dict)


def is_loader(data: object) -> bool:
    """Whether the user has passed a loader, which yields batches, in place of a dataset."""
    return isinstance(data, (DataLoader, OwnShard))


def is_prepared(loader: object) -> bool:
    """Whether Accelerate has prepared a loader, which then gives each process a part of the data."""
    return any(base.__module__.startswith("accelerate.") for base in type(loader).__mro__)


def dataset_of(data: Source) -> Source:
    """Return the dataset that a ``DataLoader`` reads; anything else unchanged."""
    batches = data.batches if isinstance(data, OwnShard) else data
    return batches.dataset if isinstance(batches, DataLoader) else batches


def find_length(thing: object) -> int | None:
    """Return ``len(thing)``, or ``None`` if the object has no length."""
    try:
        return len(thing) if isinstance(thing, Sized) else None
    except (TypeError, NotImplementedError):
        return None
