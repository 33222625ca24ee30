"""Fingerprints of data (length, checksums of a few rows), for comparison between processes and with training states."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from pytorch_accel_lite.data import Sample, Source
from pytorch_accel_lite.extension_tools.data_and_batches import find_length, is_dense, reachable_from
from pytorch_accel_lite.extension_tools.plain_types import Tree
from pytorch_accel_lite.extension_tools.random_numbers import (
    find_held_generators,
    preserving_generators,
    preserving_held_generators,
    seed_generators,
    seed_held_generators,
)

#: What ``fingerprint_of()`` returns, in plain values for a training state: ``"kind"``, ``"length"``, ``"rows"``
#: (checksums of the contents, by name) and ``"samples"`` (checksums of samples, by index).
Fingerprint: TypeAlias = dict[str, Any]

_MOST_HELD = 100  # datasets, lists, arrays and tensors
_MOST_PARTS = 16  # parts of a sample, or of a row, at each level
_MOST_VALUES = 64  # values of a tensor or an array
_LONG = 1000  # elements of a list or a dict that is not kept while samples are read
_SECONDS_OF_READING = 0.05
_MORE_READINGS = 20  # further readings of a sample that differs
_UNKNOWN = b"?"


def fingerprint_of(data: Source) -> Fingerprint:
    """Return the fingerprint of a dataset, in a few milliseconds and without changing it or any random generator.

    Covers the stored contents of the dataset: a few rows of the tensors, arrays, lists, data frames and tables in its
    attributes, and in the attributes of the datasets inside it. If there are none, a few samples are read twice, with
    seeded generators; values that differ between the two readings are left out. A stream is not read: only the names of
    its files count.
    """
    length = None if isinstance(data, IterableDataset) else find_length(data)
    rows = {name: number for name, held in _held_by(data) if (number := _checksum_of_rows(held)) is not None}
    samples = _read_samples(data, _positions(length)[::2]) if length and not rows else {}
    return {"kind": type(data).__qualname__, "length": length, "rows": rows, "samples": samples}


def compare_fingerprints(before: Fingerprint, now: Fingerprint, data: Source = None) -> str:
    """Return what differs between two fingerprints, as part of a sentence; an empty text if no difference is known.

    Args:
        data: the data of the second fingerprint. Samples that seem to differ are read again, because their augmentation
            may draw from generators that no seed reaches.
    """
    if before["length"] != now["length"] and None not in (before["length"], now["length"]):
        return f"{now['length']} samples instead of {before['length']}"
    if before["kind"] != now["kind"]:
        return f"a {now['kind']} instead of a {before['kind']}"
    for kind, name_of in (("rows", "other rows in {}"), ("samples", "another sample at index {}")):
        for name, number in now[kind].items():
            known = before[kind].get(name, number)
            if known != number and not (kind == "samples" and data is not None and _can_be(known, data, int(name))):
                return name_of.format(name)
    return ""


def _can_be(checksum: int, data: Source, index: int) -> bool:
    """Whether a sample has the given checksum in one of several readings."""
    return any(_read_samples(data, [index]).get(str(index)) == checksum for _ in range(_MORE_READINGS))


def _held_by(data: Source) -> Iterator[tuple[str, Tree]]:
    """Yield the contents of a dataset and of the datasets inside it, with names such as ``dataset.targets``."""
    left: list[tuple[str, Tree]] = [("the dataset", data)]
    seen = set()
    for name, item in islice(left, _MOST_HELD):  # grows in the loop
        if id(item) in seen:
            continue
        seen.add(id(item))
        is_short = isinstance(item, (list, tuple)) and len(item) <= _MOST_PARTS
        if is_table(item) or (_has_rows(item) and not (is_short and any(map(_has_rows, item)))):
            yield name, item
        prefix = "" if item is data else f"{name}."
        if is_table(item):
            continue
        if isinstance(item, Dataset) or item is data:
            left += [(f"{prefix}{key}", value) for key, value in getattr(item, "__dict__", {}).items()]
        elif isinstance(item, dict) and len(item) <= _MOST_PARTS:
            left += [(f"{name}[{key!r}]", value) for key, value in item.items() if isinstance(key, str)]
        elif is_short:
            left += [(f"{name}[{number}]", part) for number, part in enumerate(item) if not _is_number_or_text(part)]


def is_table(value: object) -> bool:
    """Whether an object is a ``Dataset`` of Hugging Face."""
    return all(hasattr(type(value), name) for name in ("with_format", "num_rows"))


def _has_rows(item: Tree) -> bool:
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return item.ndim > 0 and item.size != 0 if isinstance(item, np.ndarray) else item.ndim > 0 and item.numel() > 0
    return (isinstance(item, (list, tuple)) or hasattr(item, "iloc")) and len(item) > 0


def _is_number_or_text(value: object) -> bool:
    return isinstance(value, (str, bytes, int, float, complex, type(None), np.generic))


def _positions(length: int) -> list[int]:
    return sorted({0, length // 4, length // 2, 3 * length // 4, length - 1})


def _checksum_of_rows(held: Tree) -> int | None:
    """Return a checksum of a few stored rows; ``None`` if the rows do not identify the data, as in a cache."""
    with suppress(Exception):  # rows that raise errors are not compared
        if isinstance(held, torch.Tensor) and not is_dense(held):
            return None
        stored = held.with_format("arrow") if is_table(held) else held
        at = getattr(stored, "iloc", stored)
        read = [at[index] for index in _positions(len(stored))]
        rows = [row.to_pydict() if is_table(held) else row for row in read]
        described = [_bytes_of(row) for row in rows]
        if any(row is None for row in rows) or all(row == _UNKNOWN for row in described):
            return None
        return crc32(b"|".join(described), crc32(repr(len(stored)).encode()))
    return None


def _bytes_of(value: Tree, depth: int = 4) -> bytes:
    """Return a few of the values in data as bytes. Of other objects, only their presence counts."""
    if isinstance(value, torch.Tensor):
        value = _few_values(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        flat = np.asarray(value).reshape(-1)
        few = flat[:: max(flat.size // _MOST_VALUES, 1)]
        return repr((few.dtype.str, np.shape(value))).encode() + few.tobytes()
    if isinstance(value, str):
        # Processes and machines may keep the same files in different directories.
        return value.replace("\\", "/").rpartition("/")[2].encode(errors="replace")
    if isinstance(value, bytes) or _is_number_or_text(value):
        return value if isinstance(value, bytes) else repr(value).encode()
    if hasattr(value, "to_numpy"):  # the value is a row of a data frame
        value = value.to_numpy().tolist()
    if depth and isinstance(value, Mapping):
        value = [part for key in islice(value, _MOST_PARTS) for part in (key, value[key])]
    if depth and isinstance(value, (Sequence, np.ndarray)):
        parts = [_bytes_of(part, depth - 1) for part in islice(value, _MOST_PARTS)]
        return b"(" + b",".join(parts) + repr(len(value)).encode() + b")"
    return _UNKNOWN


def _few_values(tensor: torch.Tensor) -> list[object] | None:
    if not is_dense(tensor):
        return None
    flat = tensor.detach().resolve_conj().reshape(-1)
    few = flat[:: max(flat.numel() // _MOST_VALUES, 1)].cpu().contiguous()
    return [str(tensor.dtype), *tensor.shape, few.view(torch.uint8).numpy().tobytes()]


def _read_samples(data: Source, indices: list[int]) -> dict[str, int]:
    """Return checksums of a few samples by index: as many as can be read in a short time, but at least one."""
    samples: dict[str, int] = {}
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        return samples
    held = [item for item in reachable_from([data]) if not isinstance(item, torch.nn.Module)]
    generators = find_held_generators([data])
    end = time.perf_counter() + _SECONDS_OF_READING
    with (
        suppress(Exception),
        preserving_generators(),
        preserving_held_generators(generators),
        _preserving_attributes(held),
    ):
        for index in indices:
            twice = []
            for seed in (1, 2):
                seed_generators(seed)
                seed_held_generators(generators, seed)
                twice.append(_parts_of(data[index]))
            common = sorted(name for name, part in twice[0].items() if twice[1].get(name) == part != _UNKNOWN)
            if common:
                samples[str(index)] = crc32(b"|".join(name.encode() + twice[0][name] for name in common))
            if time.perf_counter() > end:
                break
    return samples


def _parts_of(sample: Sample) -> dict[str, bytes]:
    """Return the values of a sample by the names of its parts."""
    if isinstance(sample, Mapping):
        return {str(key): _bytes_of(_rounded(sample[key])) for key in islice(sample, _MOST_PARTS)}
    if isinstance(sample, (list, tuple)):
        return {str(number): _bytes_of(_rounded(part)) for number, part in enumerate(sample[:_MOST_PARTS])}
    return {"": _bytes_of(_rounded(sample))}


def _rounded(part: Tree) -> Tree:
    """Return floats without their last bits, because transforms may compute these differently on other machines."""
    if isinstance(part, np.ndarray) and part.dtype.kind == "f":
        return part.astype(np.float16)
    return part.to(torch.bfloat16) if isinstance(part, torch.Tensor) and part.is_floating_point() else part


@contextmanager
def _preserving_attributes(objects: list[object]) -> Iterator[None]:
    """Restore the attributes of objects after a block, with the elements of short lists, dicts and sets.

    Reading a sample may advance a count, fill a cache, or open a file, which later forks must not share.
    """
    attributes = [(vars(item), dict(vars(item))) for item in objects if hasattr(item, "__dict__")]
    values = [*objects, *(value for _, held in attributes for value in held.values())]
    short = {id(value): value for value in values if isinstance(value, (list, dict, set)) and len(value) <= _LONG}
    before = [(value, value.copy()) for value in short.values()]
    try:
        yield
    finally:
        for container, kept in (*before, *attributes):
            if _identities(container) != _identities(kept):
                container.clear()
                container.extend(kept) if isinstance(container, list) else container.update(kept)


def _identities(container: Iterable[object]) -> list[int]:
    return [*map(id, container), *map(id, container.values() if isinstance(container, dict) else ())]
