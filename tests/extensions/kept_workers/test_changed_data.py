"""Data that change between epochs: workers see the new data, and are kept if nothing changes."""

from __future__ import annotations

import io
import os
from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.extensions.kept_workers.changed_data import marks_of
from tests.launching import some_of
from tests.small_models import listener


class Crop:
    def __init__(self, size=0):
        self.size = size


class Samples(Dataset):
    """Gives what it holds, and the process that reads it."""

    def __init__(self):
        self.tensor = torch.zeros(8)
        self.array = np.zeros(8)
        self.labels = [0] * 8
        self.records = [{"label": 0} for _ in range(8)]
        self.transforms = [Crop()]
        self.scale = lambda value, factor=[0]: value + factor[0]
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __getitem__(self, index):
        held = [self.tensor[index].item(), self.array[index], self.labels[index], self.records[index]["label"]]
        held += [self.transforms[0].size, self.scale(0), self.epoch, os.getpid()]
        return torch.ones(1), torch.tensor(held, dtype=torch.float64)


CHANGES = {
    "tensor assigned": (0, lambda data, n: setattr(data, "tensor", torch.full((8,), float(n)))),
    "tensor in place": (0, lambda data, n: data.tensor.fill_(n)),
    "tensor by its array": (0, lambda data, n: data.tensor.numpy().fill(n)),
    "array in place": (1, lambda data, n: data.array.fill(n)),
    "list assigned": (2, lambda data, n: setattr(data, "labels", [n] * 8)),
    "list in place": (2, lambda data, n: data.labels.__setitem__(slice(None), [n] * 8)),
    "dict in a list": (3, lambda data, n: [record.update(label=n) for record in data.records]),
    "transform's attribute": (4, lambda data, n: setattr(data.transforms[0], "size", n)),
    "transform replaced": (4, lambda data, n: data.transforms.__setitem__(0, Crop(n))),
    "default of a function": (5, lambda data, n: data.scale.__defaults__[0].__setitem__(0, n)),
}
WRAPPERS = {
    "alone": lambda data: data,
    "subset": lambda data: Subset(data, range(8)),
    "concatenated": lambda data: ConcatDataset([data]),
}


class Recorder(Trainer):
    """Keeps the targets of each epoch."""

    def calculate_train_batch_loss(self, batch):
        self.seen[self.progress.epoch].append(batch[1])
        return super().calculate_train_batch_loss([batch[0], batch[1].float().sum(-1, keepdim=True)])


class Change(TrainerCallback):
    def __init__(self, change):
        self.change = change

    def on_train_epoch_start(self, trainer, **kwargs):
        trainer.seen[trainer.progress.epoch] = []
        self.change(trainer.progress.epoch)


def train(data, change, workers, seed=None, epochs=3):
    """Return the rows that each epoch has seen."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Recorder(model, nn.MSELoss(), optimizer, callbacks=[Change(change)], seed=seed)
    trainer.seen = {}
    arguments = {"num_workers": workers, "persistent_workers": True} if workers else {"num_workers": 0}
    trainer.train(data, num_epochs=epochs, train_dataloader_kwargs=arguments)
    return {epoch: torch.cat(rows) for epoch, rows in trainer.seen.items()}


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize("how", some_of(CHANGES))
def test_persistent_workers_see_data_changed_by_callbacks(how):
    column, change = CHANGES[how]
    wrap = [*WRAPPERS.values()][[*CHANGES].index(how) % len(WRAPPERS)]
    data = Samples()
    data.set_epoch = None  # otherwise an attribute changes in any case
    seen = train(wrap(data), lambda epoch: change(data, epoch), workers=2, seed=1)
    assert {epoch: rows[:, column].unique().tolist() for epoch, rows in seen.items()} == {1: [1], 2: [2], 3: [3]}


class Holds(Dataset):
    """Gives numbers that it reads from what it holds."""

    def __init__(self, held, read):
        self.held = held
        self.read = read

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(1), torch.tensor([float(self.read(self.held, index))])


def frame(n: int) -> Any:
    return pytest.importorskip("pandas").DataFrame({"y": [float(n)] * 8})


def refill(held: Any, n: int) -> None:
    held.clear()
    held.extend([n] * 8)


STRUCTURED = np.dtype([("y", float), ("note", object)])
HELD = {
    "column assigned": (lambda: frame(0), lambda data, n: data.held.__setitem__("y", [float(n)] * 8), "y"),
    "deque": (lambda: deque([0] * 8), lambda data, n: refill(data.held, n), None),
    "bytes": (lambda: bytearray(8), lambda data, n: data.held.__setitem__(slice(None), bytes([n] * 8)), None),
    "column in place": (lambda: frame(0), lambda data, n: data.held.loc.__setitem__((slice(None), "y"), float(n)), "y"),
    "array": (lambda: array("i", [0] * 8), lambda data, n: [data.held.__setitem__(i, n) for i in range(8)], None),
    "structured": (lambda: np.zeros(8, STRUCTURED), lambda data, n: data.held["y"].fill(n), "y"),
    "data frame": (lambda: frame(0), lambda data, n: setattr(data, "held", frame(n)), "y"),
    "conjugate": (
        lambda: torch.zeros(8, dtype=torch.cfloat).conj(),
        lambda data, n: setattr(data, "held", torch.full((8,), float(n), dtype=torch.cfloat).conj()),
        None,
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", HELD)
def test_workers_see_changes_in_what_a_dataset_holds(name):
    create, change, column = HELD[name]
    read = lambda held, index: getattr((held if column is None else held[column])[index], "real", 0)  # noqa: E731
    data = Holds(create(), read)
    seen = train(data, lambda epoch: change(data, epoch), workers=1)
    assert {epoch: rows.unique().tolist() for epoch, rows in seen.items()} == {1: [1], 2: [2], 3: [3]}


def test_a_mask_and_the_names_of_columns_are_compared():
    masked, table = np.ma.array(np.zeros(3), mask=[0, 0, 0]), frame(0)
    before = marks_of([masked]), marks_of([table])
    assert (marks_of([masked]), marks_of([table])) == before
    masked.mask[1] = True
    table.columns = ["z"]
    assert marks_of([masked]) != before[0]
    assert marks_of([table]) != before[1]


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["transform's attribute", "list in place", "dict in a list"])
def test_workers_see_a_change_from_minus_one_to_minus_two(how):
    column, change = CHANGES[how]  # Python gives both numbers the same hash
    data = Samples()
    data.set_epoch = None
    seen = train(data, lambda epoch: change(data, -epoch), workers=1, epochs=2)
    assert {epoch: rows[:, column].unique().tolist() for epoch, rows in seen.items()} == {1: [-1], 2: [-2]}


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_set_epoch_of_a_dataset_is_called_and_reaches_workers(wrapper, workers):
    seen = train(WRAPPERS[wrapper](Samples()), lambda epoch: None, workers)
    assert {epoch: rows[:, 6].unique().tolist() for epoch, rows in seen.items()} == {1: [0], 2: [1], 3: [2]}


def test_workers_are_kept_if_nothing_changes():
    data = Samples()
    data.set_epoch = None
    seen = train(data, lambda epoch: None, workers=1)
    assert len({pid for rows in seen.values() for pid in rows[:, 7].tolist()} - {os.getpid()}) == 1
    data.labels[0] = 1
    seen = train(data, lambda epoch: data.labels.append(0) if epoch == 2 else None, workers=1)
    assert [len(rows[:, 7].unique()) for rows in seen.values()] == [1, 1, 1]
    first, second, third = (int(rows[0, 7]) for rows in seen.values())
    assert first != second == third


def test_a_dataset_that_grows_between_epochs_is_read_in_full():
    data = Samples()
    type_of_longer = type("Longer", (Samples,), {"__len__": lambda self: len(self.labels)})
    data.__class__ = type_of_longer
    data.tensor, data.array, data.records = torch.zeros(20), np.zeros(20), data.records * 3
    seen = train(data, lambda epoch: data.labels.append(epoch), workers=2)
    assert [len(rows) for rows in seen.values()] == [9, 10, 11]
    assert [rows[:, 2].max().item() for rows in seen.values()] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["tensors", "subset", "stack"])
def test_tensors_in_memory_that_are_replaced_are_read(kind):
    x, y = torch.ones(8, 1), torch.zeros(8, 8)
    if kind == "stack":
        data = StackDataset(x, y)
        seen = train(data, lambda epoch: setattr(data, "datasets", (x, y + epoch)), 0, seed=1)
    else:
        inner = TensorDataset(x, y)
        data = Subset(inner, range(4)) if kind == "subset" else inner
        seen = train(data, lambda epoch: setattr(inner, "tensors", (x, y + epoch)), 0, seed=1)
    assert {epoch: rows.unique().tolist() for epoch, rows in seen.items()} == {1: [1], 2: [2], 3: [3]}


def test_the_rows_of_a_subset_may_change_in_place():
    rows = [0, 1, 2, 3]
    data = Subset(TensorDataset(torch.ones(8, 1), torch.arange(8.0)[:, None]), rows)
    seen = train(data, lambda epoch: rows.__setitem__(0, 3 + epoch), 0, seed=1)
    assert [sorted(seen[epoch][:, 0].tolist())[-1] for epoch in seen] == [4, 5, 6]


def test_every_element_of_long_lists_and_large_arrays_counts():
    data = Samples()
    data.labels, data.array = [0] * 3_000_000, np.zeros(4_000_000)
    data.pairs = [(str(number), -1.0) for number in range(20_000)]
    data.records = [{"label": 0, "text": [str(number)]} for number in range(20_000)]
    data.tensors = [(torch.zeros(2), 0) for _ in range(2_000)]
    data.crops = {number: Crop() for number in range(2_000)}
    marks = [marks_of([data])]
    assert marks == [marks_of([data])]
    for change in (
        lambda: data.labels.__setitem__(1_234_567, 1),
        lambda: data.array.__setitem__(1_234_567, 1),
        lambda: data.pairs.__setitem__(12_345, ("12345", -2.0)),
        lambda: data.records[12_345]["text"].append("more"),
        lambda: data.tensors[1_234][0].numpy().fill(1),
        lambda: setattr(data.crops[1_234], "size", 1),
    ):
        change()
        assert marks_of([data]) not in marks
        marks.append(marks_of([data]))


def test_more_than_can_be_compared_counts_as_changed():
    assert marks_of([[0] * 10_000_000]) != marks_of([[0] * 10_000_000])
    crops = [Crop() for _ in range(20_000)]
    assert marks_of([crops]) != marks_of([crops])


def test_mapped_files_are_not_compared(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(10))
    data = Samples()
    data.mapped = np.load(tmp_path / "a.npy", mmap_mode="r+")
    before = marks_of([data])
    data.mapped[:] = 1  # workers read the file
    assert marks_of([data]) == before


class Hidden(Dataset):
    """Gives a number that it holds where it cannot be compared."""

    def __init__(self):
        self.numbers = io.BytesIO(bytes([0]))

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(1), torch.tensor([float(self.numbers.getvalue()[0])])


def test_workers_start_again_when_data_must_be_read_again():
    class Changes(TrainerCallback):
        def on_update_end(self, trainer, **kwargs):
            if trainer.progress.update == 2:
                trainer.train_dataset.numbers.write(bytes([1]))
                trainer.train_dataloader.read_again()

    seen = []
    model = nn.Linear(1, 1)
    note = listener(on_train_step_end=lambda trainer, batch, **_: seen.extend(batch[1].flatten().tolist()))
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.0), callbacks=[Changes(), note])
    workers = {"num_workers": 1, "persistent_workers": True}
    trainer.train(Hidden(), 1, per_device_batch_size=2, train_dataloader_kwargs=workers)
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1]
