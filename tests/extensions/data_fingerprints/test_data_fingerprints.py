"""Data that differ between processes are found. ``recorded_settings`` compares them with those of a resumed run."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset, random_split

from pytorch_accel_lite.extensions.data_fingerprints import compare_fingerprints, fingerprint_of
from tests.own_loaders import Transformed, numbers, trained_on
from tests.ranks import rank, world_size
from tests.small_models import Stream, adamw_trainer


def split_datasets() -> Any:
    """The errors for datasets that differ between processes, and the samples of equal ones."""
    data = {}
    torch.manual_seed(rank())
    data["drawn"] = random_split(numbers(), [12, 4])[0]
    data["drawn, inside another"] = Transformed(data["drawn"])
    data["drawn, beside another"] = ConcatDataset([numbers(), data["drawn"]])
    data["by rank"] = Subset(numbers(), range(rank(), 16 - 16 % world_size(), world_size()))
    data["longer on the first"] = numbers(16 if rank() == 0 else 14)
    torch.manual_seed(rank())
    data["made before any seed"] = TensorDataset(torch.randn(16, 1), torch.zeros(16, 1))
    data["inside a dataset"] = Transformed(TensorDataset(torch.randn(16, 1), torch.zeros(16, 1)))
    data["stacked"] = StackDataset(TensorDataset(torch.randn(16, 1)), TensorDataset(torch.zeros(16, 1)))
    torch.manual_seed(0)
    data["the same"] = Transformed(random_split(numbers(), [12, 4])[0])
    return {name: trained_on(part, lambda data: DataLoader(data, 4, shuffle=True)) for name, part in data.items()}


@pytest.mark.processes
def test_datasets_that_differ_between_processes_are_refused(ranks):
    results = ranks(split_datasets)
    of_all = [result.pop("the same")[0] for result in results]
    first, second = ([sample for epochs in of_all for sample in epochs[number]] for number in (0, 1))
    assert len(first) == len(set(first)) == 12
    assert sorted(first) == sorted(second)
    for result in results:
        for name, said in result.items():
            assert "datasets with different rows, of lengths [" in said, name
            assert "call torch.manual_seed before random_split" in said, name


class Holds(Dataset[Any]):
    """A dataset of the user's own with rows in attributes."""

    def __init__(self, x: Any, paths: Any = ()) -> None:
        self.x, self.paths = x, paths

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.x[index]


class Computes(Holds):
    """Makes its samples, with noise that differs each time."""

    def __init__(self, seed: int) -> None:
        self.seed, self.count = seed, 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        x = torch.randn(1, generator=torch.Generator().manual_seed(10 * index + self.seed))
        return x, torch.rand(1)


def datasets_of_their_own() -> Any:
    same = torch.arange(8.0)[:, None]
    data = {
        "tensor": Holds(same + rank()),
        "list": Holds(list(same + rank())),
        "array": Holds((same + rank()).numpy()),
        "computed": Computes(rank()),
        "the same": Holds(same, [f"/on/rank {rank()}/{index}.png" for index in range(8)]),
        "the same, computed": Computes(0),
    }
    said = {}
    for name, dataset in data.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained_on(dataset, lambda data: DataLoader(data, 4), num_epochs=1)
        said[name] = [str(warning.message) for warning in caught if "of the processes differ" in str(warning.message)]
    return said


@pytest.mark.processes
def test_rows_that_differ_between_processes_are_warned_of(two_ranks):
    first, second = two_ranks(datasets_of_their_own)
    assert {name for name, said in first.items() if said} == {"tensor", "list", "array", "computed"}
    assert all("other rows in x" in said or "another sample at" in said for texts in first.values() for said in texts)
    assert not any(second.values())


def hugging_face_tables() -> dict[str, str]:
    """The errors for tables that were split or shuffled differently on each process, and the result of equal ones."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    rows = Dataset.from_dict({"x": [[float(i)] for i in range(24)], "y": [[1.0]] * 24}).with_format("torch")
    said = {}
    for name, table in {
        "split": split_dataset_by_node(rows, rank(), world_size()),
        "shuffled": rows.shuffle(seed=rank()),
        "the same": rows.shuffle(seed=0),
    }.items():
        model = nn.Linear(1, 1)
        trainer = adamw_trainer(model)
        try:
            trainer.train(table, 1, collate_fn=lambda rows: [torch.stack([row[k] for row in rows]) for k in "xy"])
            said[name] = "trained"
        except ValueError as error:
            said[name] = str(error)
    return said


@pytest.mark.processes
def test_a_table_that_each_process_has_a_part_of_is_refused(two_ranks):
    pytest.importorskip("datasets")
    for said in two_ranks(hugging_face_tables):
        assert "different rows, of lengths [12, 12]. Each would read only a share" in said["split"]
        assert "different rows, of lengths [24, 24]" in said["shuffled"]
        assert said["the same"] == "trained"


class Counts(Computes):
    """Draws from its own generator, and counts what is read."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.rng, self.read = np.random.default_rng(1), list[int]()

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return *super().__getitem__(index), self.rng.normal(), random.random()


def test_a_fingerprint_changes_neither_data_nor_generators():
    data = Counts()
    before = torch.get_rng_state(), random.getstate(), data.rng.bit_generator.state
    first = fingerprint_of(data)
    assert first["samples"].keys() <= {"0", "4", "7"}
    assert (data.count, data.read, data.rng.bit_generator.state) == (0, [], before[2])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert json.loads(json.dumps(first)) == first == fingerprint_of(data)  # plain values, for a state


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (numbers(), ""),
        (numbers(14), "14 samples instead of 16"),
        (Holds(torch.arange(16.0)), "a Holds instead of a TensorDataset"),
        (TensorDataset(torch.arange(16.0)[:, None], torch.ones(16, 1)), "other rows in tensors[1]"),
    ],
)
def test_a_difference_between_data_is_described(now, difference):
    assert compare_fingerprints(fingerprint_of(numbers()), fingerprint_of(now)) == difference


def test_computed_samples_are_compared_where_they_do_not_vary():
    before = fingerprint_of(Computes(0))
    assert compare_fingerprints(before, fingerprint_of(Computes(0)), Computes(0)) == ""
    assert compare_fingerprints(before, fingerprint_of(Computes(1)), Computes(1)) == "another sample at index 0"


def test_streams_are_not_read():
    class Untouched(Stream):
        def __iter__(self) -> Any:
            raise AssertionError("the stream is read")

    assert fingerprint_of(Untouched())["length"] is None
