"""Checking that all processes have the same data."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from pytorch_accel_lite.data import Source
from pytorch_accel_lite.extending import Ranks
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import (
    PASS_OWN_SHARD,
    checksum_of_indices,
    find_length,
    nested_in,
)
from pytorch_accel_lite.extensions.data_fingerprints.fingerprints import compare_fingerprints, fingerprint_of, is_table


def check_same_data(dataset: Source, ranks: Ranks) -> None:
    """Check that a map dataset has the same samples on all processes, as far as possible without reading them.

    Compares lengths, the indices of subsets, and a few rows of tensors and of Hugging Face's tables, also in datasets
    that are attributes of others. If the contents of other kinds of datasets differ, there is only a warning, because
    the contents need not be samples. Call it on every process.

    Raises:
        ValueError: on all processes, for example after a ``random_split`` that was not seeded
    """
    parts = nested_in(dataset, lambda value: isinstance(value, Dataset) or is_table(value))
    local = find_length(dataset), [_described(part) for part in parts], fingerprint_of(dataset)
    gathered = ranks.all_gather_object(local)
    if any(other[:2] != gathered[0][:2] for other in gathered):
        raise ValueError(
            f"The processes have datasets with different rows, of lengths {[length for length, *_ in gathered]}. Each "
            "would read only a share of its own rows, so most of the data would be lost. Pass the same dataset on "
            "every process: call torch.manual_seed before random_split and before random data are created, and do not "
            "split by rank, as split_dataset_by_node and shard() do: the trainer shards the data. "
            f"{PASS_OWN_SHARD}"
        )
    differences = (compare_fingerprints(gathered[0][2], other[2]) for other in gathered)
    if ranks.rank == 0 and (differs := next(filter(None, differences), "")):
        warn_outside(
            f"The datasets ({type(dataset).__name__}) of the processes differ: one has {differs}. Each process reads "
            "only a share of its own dataset, so samples that the others lack may never be seen. Create the same data "
            "on every process: call torch.manual_seed, np.random.seed and random.seed before random data are created. "
            f"{PASS_OWN_SHARD}"
        )


def _described(dataset: Source) -> tuple[str, object]:
    """Return the type of a dataset, and checksums if it is a subset or a table, or consists of tensors or arrays."""
    compared: object = 0
    if isinstance(dataset, Subset):
        compared = checksum_of_indices(dataset.indices)
    elif is_table(dataset):  # rows as stored, before any transform
        stored = dataset.with_format("arrow")
        positions = sorted({0, len(dataset) // 2, len(dataset) - 1}) if len(dataset) else []
        compared = crc32(repr([stored[index].to_pydict() for index in positions]).encode())
    elif isinstance(dataset, (TensorDataset, torch.Tensor, np.ndarray)):
        compared = fingerprint_of(dataset)["rows"]
    return type(dataset).__qualname__, compared
