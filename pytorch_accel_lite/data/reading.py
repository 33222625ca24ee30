"""Reading batches: from memory a whole batch at a time, and with randomness that is a function of the position."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from pytorch_accel_lite.base.randomness import mix, seed_generators
from pytorch_accel_lite.base.text import add_note, notes_of
from pytorch_accel_lite.data.shares import grouped

_STEPS = 256  # whose indices are copied to a device together
_READING = "In reading"  # begins the note of an error
_CPU = torch.device("cpu")
_Copies = dict[torch.device, torch.Tensor]
#: The seed of a share, which is that of its first sample; the mixed seed and epoch, from which those of the others
#: follow; the position of the first sample; the indices of the samples.
SeededShare = tuple[int, int, int, list[Any]]
#: The generators whose draws by samples are told apart: torch's, and those of python and numpy.
_TORCH, _OTHERS = "torch", "others"
_ALL = frozenset({_TORCH, _OTHERS})
#: What tells the state of a generator, and the generator.
_ASKS = [
    (random, "getstate", _OTHERS),
    (np.random, "get_state", _OTHERS),
    *((module, name, _TORCH) for module in (torch, torch.random) for name in ("get_rng_state", "initial_seed")),
]
#: Any seed, and the numbers that each of the generators draws first after it.
_KNOWN = 1
_FIRST_DRAWN = {
    _TORCH: (torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(_KNOWN >> 1)).item(),),
    _OTHERS: (random.Random(_KNOWN).random(), np.random.RandomState(_KNOWN).random_sample()),
}


def inner_datasets(dataset: Any) -> list[Any]:
    """Return the datasets inside one of torch's dataset wrappers; an empty list for any other dataset."""
    reads_many = getattr(type(dataset), "__getitems__", None)
    if reads_many is Subset.__getitems__:
        return [dataset.dataset]
    is_concatenation = isinstance(dataset, ConcatDataset) and type(dataset).__getitem__ is ConcatDataset.__getitem__
    if reads_many is StackDataset.__getitems__ or is_concatenation:
        return list(dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets)
    return []


def reads_batches(dataset: Any) -> bool:
    """Whether a dataset reads many samples at once; torch's wrappers always have ``__getitems__``, so look inside."""
    inner = inner_datasets(dataset)
    has_method = callable(getattr(dataset, "__getitems__", None))
    return has_method and (not inner or any(map(reads_batches, inner)))


class InMemory(NamedTuple):
    """Data in memory.

    :param tensors: tensors, which have a row for each sample
    :param subset: the rows of a ``Subset``; ``None`` for all
    :param arrange: makes a batch from a list of rows of each tensor
    """

    tensors: Sequence[torch.Tensor]
    subset: torch.Tensor | None = None
    arrange: Callable[[list[torch.Tensor]], Any] | None = None

    def is_on(self, device: torch.device) -> bool:
        """Whether all tensors are on a device, whose number may be left out."""
        there = torch.empty(0, device=device).device
        return all(tensor.device == there for tensor in self.tensors)


def tensors_in_memory(dataset: Any) -> InMemory | None:
    """Return the tensors of a ``TensorDataset``, or of a ``StackDataset`` or a ``Subset`` of such; or ``None``."""
    if type(dataset) is TensorDataset:
        return InMemory(dataset.tensors)
    if type(dataset) is StackDataset:
        tensors, structure = tree_flatten(_stacked(dataset))
        is_all = all(tensor is not None for tensor in tensors)
        return InMemory(tensors, arrange=partial(tree_unflatten, treespec=structure)) if is_all else None
    if type(dataset) is Subset:
        inner = tensors_in_memory(dataset.dataset)
        if inner is not None:
            indices = as_rows(dataset.indices, len(dataset.dataset))  # type: ignore[arg-type]
            return inner._replace(subset=indices if inner.subset is None else inner.subset[indices])
    return None


def _stacked(dataset: Any) -> Any:
    """Return the tensors of a dataset, arranged as in a batch, with ``None`` for other data."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    if type(dataset) is not StackDataset:
        return dataset if type(dataset) is torch.Tensor else None
    if isinstance(dataset.datasets, dict):
        return {name: _stacked(part) for name, part in dataset.datasets.items()}
    return [_stacked(part) for part in dataset.datasets]


def as_rows(indices: Any, size: int) -> torch.Tensor:
    """Return indices as ``index_select`` takes them, with negative ones, which count from the end, made positive."""
    tensor = torch.as_tensor(indices)
    if tensor.numel() and (tensor.dtype is torch.bool or tensor.is_floating_point()):
        raise TypeError(
            f"Indices of samples, of a Subset or a sampler, must be integers, not {tensor.dtype} as in "
            f"{tensor.flatten()[:4].tolist()}. Convert a mask by torch.as_tensor(mask).nonzero().flatten()."
        )
    tensor = tensor.to(torch.int64)
    return torch.where(tensor < 0, tensor + size, tensor)


def read_rows(memory: InMemory, indices: Iterable[Any], size: int, has_fixed_order: bool, pin: bool) -> Iterator[Any]:
    """Yield the batches of data in memory; from a device, without waiting for it.

    :param indices: those of each step; tensors of them hold no negative ones
    :param size: number of samples
    :param has_fixed_order: whether indices may be drawn before the step that reads them
    :param pin: whether to put batches into pinned memory
    """
    tensors, subset, arrange = memory
    rows = (step if isinstance(step, torch.Tensor) else as_rows(step, size) for step in indices)
    if subset is not None:
        rows = (subset[step] for step in rows)
    if memory.is_on(_CPU):
        steps: Iterator[_Copies] = ({_CPU: step} for step in rows)
    else:
        devices = {tensor.device for tensor in tensors}
        steps = _copied(rows, devices, _STEPS if has_fixed_order else 1)
    for copies in steps:
        batch = [tensor.index_select(0, copies[tensor.device]) for tensor in tensors]
        batch = [tensor.pin_memory() for tensor in batch] if pin else batch
        yield batch if arrange is None else arrange(batch)


def _copied(rows: Iterator[torch.Tensor], devices: Iterable[torch.device], num_steps: int) -> Iterator[_Copies]:
    """Yield the rows of each step by device, after copying those of several steps together."""
    for steps in grouped(rows, num_steps):
        together = torch.cat(steps)
        if torch.cuda.is_available():
            together = together.pin_memory()  # otherwise the copy would wait for the steps before it
        sizes = [len(step) for step in steps]
        copies = {device: together.to(device, non_blocking=True).split(sizes) for device in devices}  # type: ignore[no-untyped-call]
        for number in range(len(steps)):
            yield {device: of_steps[number] for device, of_steps in copies.items()}


class SampleReader(Dataset[Any]):
    """Reads the samples of a batch one by one, and notes in an error which of them could not be read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[Any]) -> Any:
        """Return the samples with these indices."""
        samples = []
        try:
            for index in indices:
                samples.append(self.dataset[index])
        except Exception as error:
            note_sample(error, self.dataset, index)
            raise
        return samples


def reader_of(dataset: Any) -> Any:
    """Return what reads batches as a ``DataLoader`` does: the dataset itself if it reads many samples at once."""
    is_subset = inner_datasets(dataset) and isinstance(dataset, Subset)
    reads_many = reads_batches(dataset) if is_subset else getattr(dataset, "__getitems__", None) is not None
    return dataset if reads_many else SampleReader(dataset)


def note_sample(error: Exception, dataset: Any, index: Any) -> None:
    """Note in an error that it was raised by reading a sample."""
    place = f"{type(dataset).__name__}[{index!r}]"
    while type(dataset) is Subset:
        dataset, index = dataset.dataset, dataset.indices[index]
        place += f", which is {type(dataset).__name__}[{index!r}]"
    add_note(error, f"{_READING} {place}.")


def names_sample(error: Exception) -> bool:
    """Whether an error, perhaps of a worker, says which sample could not be read."""
    return any(re.search(rf"(?m)^{_READING} ", text) for text in [str(error), *notes_of(error)])


class SeededReader(SampleReader):
    """Reads batches with randomness that is a function of (seed, epoch, position).

    Every sample is read with generators seeded from its place in the epoch's order. A dataset that reads many samples
    at once (``__getitems__``) gets one seed for them, and collating a batch continues from there. So the number of
    workers, the number of processes and interruptions do not affect what is read.

    Seeding takes longer than reading many a sample. A generator from which the first batch has not drawn, nor asked
    for its state, is only seeded for each batch, such that it is noticed when a sample does nonetheless; the batch is
    then read again, and from then on every sample is read with its own seed.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._reads_batches = reads_batches(dataset)
        self._draws: frozenset[str] | None = None  # the generators that samples draw from, once known

    def __getitems__(self, share: SeededShare) -> Any:  # type: ignore[override]
        """Return the samples of a share."""
        seed, epoch_seed, first, indices = share
        if self._reads_batches:
            seed_generators(seed)
            return self.dataset.__getitems__(indices)
        if self._draws is None:
            samples, self._draws = self._read(epoch_seed, first, indices, _ALL)
            self._draws |= _drawn_since(mix(first + len(indices) - 1, after=epoch_seed))
            return samples
        samples, drawn = self._read(epoch_seed, first, indices, self._draws)
        if not drawn <= self._draws:
            self._draws |= drawn
            return self.__getitems__(share)
        return samples

    def _read(
        self, epoch_seed: int, first: int, indices: list[Any], seeded: frozenset[str]
    ) -> tuple[list[Any], frozenset[str]]:
        """Return samples, and the generators whose states were asked for, or that others than those seeded drew from.

        :param seeded: generators that get a seed for each sample
        """
        samples: list[Any] = []
        error = None
        if seeded != _ALL:
            _seed(_KNOWN, _ALL - seeded)
        try:
            with _StatesRead() as states:
                for position, index in enumerate(indices, first):
                    if seeded:
                        _seed(mix(position, after=epoch_seed), seeded)
                    samples.append(self.dataset[index])
        except Exception as raised:
            error = raised
            note_sample(error, self.dataset, index)
        drawn = states.of
        if seeded != _ALL:
            for name in _ALL - seeded:
                if _draw(name) != _FIRST_DRAWN[name]:
                    drawn.add(name)
            # Collating continues from the last sample.
            _seed(mix(first + len(indices) - 1, after=epoch_seed), _ALL - seeded)
        if error is not None and drawn <= seeded:  # otherwise it may be due to the numbers
            raise error
        return samples, frozenset(drawn)


def _seed(seed: int, generators: frozenset[str]) -> None:
    if _OTHERS in generators:
        seed_generators(seed, with_torch=_TORCH in generators)
    else:
        torch.default_generator.manual_seed(seed >> 1)  # torch.manual_seed also visits every device


def _draw(generator: str) -> tuple[float, ...]:
    if generator == _TORCH:
        return (torch.empty((), dtype=torch.int64).random_().item(),)
    return random.random(), np.random.random_sample()


class _StatesRead:
    """Notes whose states are asked for in a block.

    A sample that does so may depend on them, even if it draws no number, or restores the states afterwards.
    """

    def __enter__(self) -> _StatesRead:
        self.of: set[str] = set()
        self._usual = [getattr(module, name) for module, name, _ in _ASKS]
        for (module, name, generator), ask in zip(_ASKS, self._usual, strict=True):
            setattr(module, name, partial(self._note, generator, ask))
        return self

    def __exit__(self, *error: object) -> None:
        for (module, name, _), ask in zip(_ASKS, self._usual, strict=True):
            setattr(module, name, ask)

    def _note(self, generator: str, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.of.add(generator)
        return ask(*args, **kwargs)


def _drawn_since(seed: int) -> frozenset[str]:
    """Return the generators from which a number has been drawn since all were given this seed."""
    before: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state()
    now: Any = np.random.get_state()
    is_numpy_new = before[2:] == now[2:] and np.array_equal(before[1], now[1])
    is_python_new = random.Random(seed).getstate() == random.getstate()
    is_torch_new = torch.equal(
        torch.default_generator.get_state(), torch.Generator().manual_seed(seed >> 1).get_state()
    )
    is_new = {_TORCH: is_torch_new, _OTHERS: is_numpy_new and is_python_new}
    return frozenset(name for name, unused in is_new.items() if not unused)
