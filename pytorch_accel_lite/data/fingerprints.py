"""Fingerprints of datasets, by which a resumed run sees that it was given other data."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import IterableDataset

from pytorch_accel_lite.base.inspection import find_length, nested_in
from pytorch_accel_lite.base.randomness import find_generators, preserving_generators, seed_found, seed_generators

_SECONDS = 1.0  # after which no further sample is read
_MORE_READINGS = 8  # of a sample that differs: its augmentation may draw from generators that cannot be seeded
_SEED = 20 << 32
_MOST_NUMBERS = 1 << 20  # of an array
_MOST_ITEMS = 1000  # of a list or dict that is restored
_TOLERANCE = 1e-3  # of floats, whose last bits may depend on the machine

#: What identifies a part of a sample: its shape and a few numbers; ``None`` if it is another at each reading.
Part = list[Any] | None


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return the length of a dataset and what identifies up to three of its samples, in JSON types.

    Each is read twice. Leaves the generators and the dataset as they were, including counters, caches and files that
    it opens when it is first read. Data that cannot be indexed, and slow or failing ones, have fewer samples or none.
    """
    length = find_length(dataset)
    can_be_indexed = hasattr(type(dataset), "__getitem__") and not isinstance(dataset, (IterableDataset, str))
    samples: dict[str, list[Part]] = {}
    if can_be_indexed and length:
        end = time.monotonic() + _SECONDS
        with _leaving_as_it_was(dataset):
            for index in sorted({0, length // 2, length - 1}):
                first = _read(dataset, index) if time.monotonic() < end else None
                again = _read(dataset, index) if first is not None else None
                if first is not None and again is not None:
                    samples[str(index)] = [part if part in again[i : i + 1] else None for i, part in enumerate(first)]
    return {"length": length, "samples": samples}


def describe_change(before: Mapping[str, Any], now: Mapping[str, Any], dataset: Any) -> str:
    """Return how a dataset differs from that of an earlier fingerprint; empty if it does not, as far as is known.

    :param now: its own fingerprint
    """
    if before["length"] != now["length"]:
        return f"{_samples(now['length'])} (was {_samples(before['length'])})"
    for index, parts in before["samples"].items():
        if index in now["samples"] and not _fits(parts, now["samples"][index]):
            with _leaving_as_it_was(dataset):
                readings = [_read(dataset, int(index)) for _ in range(_MORE_READINGS)]
            if not any(_fits(parts, reading) for reading in readings if reading is not None):
                return f"other samples (such as that with index {index})"
    return ""


def _samples(length: int | None) -> str:
    return "no length" if length is None else f"{length} samples"


def _fits(parts: list[Part], others: list[Part]) -> bool:
    return len(parts) == len(others) and all(map(_is_alike, parts, others))


def _is_alike(part: Part, other: Part) -> bool:
    if part is None or other is None or part == other:
        return True
    if part[0] != other[0] or len(part) != len(other):
        return False
    pairs = list(zip(part[1:], other[1:], strict=True))
    if not all(isinstance(value, float) for pair in pairs for value in pair):
        return False
    these, those = np.array(pairs).T
    return np.allclose(these, those, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _read(dataset: Any, index: int) -> list[Part] | None:
    """Return what identifies the parts of a sample, read with a fixed seed; ``None`` if it cannot be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_generators(_SEED)
        seed_found(find_generators([dataset]), _SEED)
        try:
            return [*_parts(dataset[index])]
        except Exception:  # which training raises, if it reads this sample
            return None


def _parts(value: Any) -> Iterator[Part]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        for item in value:
            yield from _parts(item)
    elif isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_quantized and not value.is_nested
        yield _of_array(value.detach().resolve_conj().cpu().to(_numpy_type(value)).numpy()) if is_plain else ["tensor"]
    elif isinstance(value, (np.ndarray, np.generic, bool, int, float)) or hasattr(value, "__array_interface__"):
        yield _of_array(np.asarray(value))
    elif isinstance(value, (str, bytes)):
        yield ["text", crc32(value.encode(errors="replace") if isinstance(value, str) else value)]
    else:
        yield [type(value).__name__]


def _numpy_type(tensor: torch.Tensor) -> torch.dtype:
    """Return the type that numpy has for a tensor's values."""
    return torch.float32 if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor.dtype


def _of_array(array: np.ndarray) -> Part:
    """Return the shape of an array, its mean, the mean of its absolute values, and a few of its numbers."""
    flat = array.reshape(-1)[:: max(array.size // _MOST_NUMBERS, 1)]
    if array.dtype.kind not in "biuf" or not array.size:
        return [f"{array.dtype.kind}{array.shape}", crc32(np.ascontiguousarray(flat).tobytes())]
    few = flat[:: max(flat.size // 8, 1)][:8]
    if array.dtype.kind != "f":  # each number of labels and tokens counts
        return [f"i{array.shape}", crc32(np.ascontiguousarray(flat.astype(np.int64)).tobytes())]
    numbers = flat.astype(np.float64)
    return [f"f{array.shape}", *(float(number) for number in (numbers.mean(), np.abs(numbers).mean(), *few))]


@contextmanager
def _leaving_as_it_was(dataset: Any) -> Iterator[None]:
    """Undo what reading samples in a block changes in a dataset and in those within it, and in the generators."""
    restorers = [_restorer(generator) for generator in find_generators([dataset])]
    parts = nested_in(dataset, lambda value: hasattr(type(value), "__getitem__") and hasattr(value, "__dict__"))
    attributes = [(part, dict(vars(part))) for part in parts if hasattr(part, "__dict__")]
    values = (value for _, saved in attributes for value in saved.values())
    containers = [(v, v.copy()) for v in values if type(v) in (list, dict, set) and len(v) <= _MOST_ITEMS]
    with preserving_generators():
        try:
            yield
        finally:
            for part, saved in attributes:
                vars(part).clear()
                vars(part).update(saved)
            for container, content in containers:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
            for restore in restorers:
                restore()


def _restorer(generator: Any) -> Callable[[], object]:
    """Return a function that restores the state that a generator has now."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.SystemRandom):  # which has none
        return lambda: None
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())
