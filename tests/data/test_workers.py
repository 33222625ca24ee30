"""The workers of loaders: when they are used, how they begin and end, and errors while they read."""

from __future__ import annotations

import gc
import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, Subset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.data import OwnShard
from pytorch_accel_lite.data.loader_creation import default_num_workers
from pytorch_accel_lite.extension_tools.data_and_batches import DATA_MARKS
from tests.datasets import Batched
from tests.launching import run_code, some_of
from tests.small_models import (
    Rows,
    Stream,
    adamw_trainer,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_trainer,
    train,
)
from tests.streams import ShuffledSamples


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("data", [float64_data(12), Rows(float64_data(12))])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_the_loader_can_be_read_while_an_epoch_is_under_way(data, workers):
    seen: list[torch.Tensor] = []
    inside: list[int] = []

    def look(trainer, batch, **kwargs):
        seen.append(batch[0])
        inside.append(sum(len(batch[0]) for batch in trainer.train_dataloader))
        next(iter(trainer.train_dataloader))  # and not to its end

    trainer = adamw_trainer(float64_model(), callbacks=[listener(on_train_step_end=look)], seed=1)
    trainer.train(data, 2, per_device_batch_size=5, train_dataloader_kwargs={"num_workers": 0} | workers)
    assert inside == [12] * 6
    for epoch in (seen[:3], seen[3:]):
        assert sorted(torch.cat(epoch)[:, 0].tolist()) == sorted(float64_data(12).tensors[0][:, 0].tolist())


@pytest.mark.extension("streams")
def test_a_stream_with_persistent_workers_is_read_by_later_runs():
    loader = DataLoader(Stream(), 4, num_workers=1, persistent_workers=True)
    trainer = make_trainer()
    trainer.train(loader, 2, eval_dataset=DataLoader(Stream(), 4, num_workers=1, persistent_workers=True))
    assert trainer.evaluate() == trainer.evaluate(loader)
    trainer.train(loader, 1)
    assert trainer.progress.samples == 6


class ReadBy(Dataset[Any]):
    """Gives the process that reads, a batch at a time, for which no worker is used by default."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.ones(4), torch.tensor([float(os.getpid())])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.extension("kept_workers")
def test_workers_that_are_asked_for_stay_between_epochs():
    readers = []
    note = listener(on_train_step_end=lambda trainer, batch, **_: readers.extend(batch[1].flatten().tolist()))
    train(make_trainer([note]), 2, train_dataset=ReadBy(), train_dataloader_kwargs={"num_workers": 1})
    assert len({*readers}) == 1
    assert os.getpid() not in readers


def test_workers_are_used_only_where_they_pay_off():
    data = float64_data(4)
    assert default_num_workers(data, 1) == default_num_workers(Subset(data, [1]), 1) == 0
    assert default_num_workers(StackDataset(x=data.tensors[0], y=data.tensors[1]), 1) == 0
    assert default_num_workers(Batched(data), 1) == default_num_workers(ShuffledSamples(4), 1) == 0
    cores = len(os.sched_getaffinity(0))
    assert default_num_workers(Rows(data), 1) == (min(cores, 8) if cores > 1 else 0)
    assert default_num_workers(Rows(data), cores) == 0


class Scaled(Rows):
    """Rows that are set up in each worker."""

    scale = 1.0

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * self.scale, y


def scale_rows(worker_id):
    torch.utils.data.get_worker_info().dataset.scale = 2.0


@pytest.mark.parametrize("seed", [None, 0])
def test_workers_can_set_up_their_copy_of_the_dataset(seed):
    data = float64_data(6)
    kwargs = {"num_workers": 1, "worker_init_fn": scale_rows}
    trainer = Trainer(nn.Identity(), None, None, callbacks=[], seed=seed)
    outputs = trainer.predict(Scaled(data), dataloader_kwargs=kwargs)
    assert torch.equal(outputs, 2 * data.tensors[0])


class Dies(Rows):
    def __getitem__(self, index):
        if index == 3 and torch.utils.data.get_worker_info() is not None:
            os._exit(9)
        return super().__getitem__(index)


def fails_to_collate(rows):
    raise KeyError("no such column")


@pytest.mark.parametrize(
    ("dataset", "kwargs", "error", "message"),
    [
        # What torch says of it depends on the instant at which the worker dies. Its signal handler raises wherever the
        # process is, even where Python can only ignore it; the loader finds out a little later then.
        pytest.param(
            Dies(float64_data(8)),
            {"num_workers": 2},
            (RuntimeError, OSError),
            r"worker .* exited unexpectedly|[Cc]onnection",
            marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        ),
        (Rows(float64_data(8)), {"num_workers": 2, "collate_fn": fails_to_collate}, KeyError, "in fails_to_collate"),
        (Rows(float64_data(8)), {"num_workers": 0, "collate_fn": fails_to_collate}, KeyError, "no such column"),
    ],
)
def test_errors_while_reading_reach_the_user(dataset, kwargs, error, message):
    with pytest.raises(error, match=message):
        adamw_trainer(float64_model()).train(dataset, 1, per_device_batch_size=2, train_dataloader_kwargs=kwargs)


class CollectsGarbage(IterableDataset):
    """Runs the garbage collector before each sample, in the process that reads it."""

    def __iter__(self):
        for sample in float64_data(8):
            gc.collect()
            yield sample


class CollectsGarbageRows(Rows):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


WORKERS_THAT_DO_NOT_BEGIN = """
import os, pathlib, sys, time, warnings
from pytorch_accel_lite.data import worker_startup
from tests.launching import run_code
from tests.small_models import Rows, Stream, make_data, make_trainer, train

tried = pathlib.Path(sys.argv[1])

def hang_at_first():
    count = len(list(tried.iterdir()))
    (tried / str(count)).touch()
    if count in (0, 2):  # the first worker, and the second
        time.sleep(1000)

os.register_at_fork(after_in_child=hang_at_first)
worker_startup.SECONDS_TO_BEGIN = 0.5
warnings.filterwarnings("ignore", "Stream gives the same batch to two workers")
trainer = train(make_trainer(), train_dataset=Stream() if sys.argv[2] == "stream" else Rows(make_data()),
                train_dataloader_kwargs={"num_workers": 2, "batch_size": 2})
print(trainer.progress.samples, len(list(tried.iterdir())))
"""


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "samples"), [("map", 6), ("stream", 12)])
def test_a_forked_worker_that_does_not_begin_is_replaced(tmp_path, kind, samples):
    assert run_code(WORKERS_THAT_DO_NOT_BEGIN, str(tmp_path), kind).split() == [str(samples), "4"]


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "seed"), some_of(product(["rows", "stream", "own"], [None, 0])))
def test_workers_do_not_finalise_objects_of_their_parent(tmp_path, kind, seed):
    """A process group or an iterator finalised in a fork waits forever for threads that it does not have."""
    dataset = CollectsGarbageRows(float64_data(8)) if kind == "rows" else CollectsGarbage()
    finalised = tmp_path / "finalised"

    class Discarded:
        def __init__(self):
            self.itself = self

        def __del__(self):
            with finalised.open("a") as file:
                file.write(f"{os.getpid()}\n")

    gc.disable()
    try:
        Discarded()
        kwargs = {"num_workers": 2} if kind == "rows" else {"num_workers": 1, "shuffle": False}
        trainer = adamw_trainer(float64_model(), seed=seed)
        if kind == "own":
            own = OwnShard(DataLoader(dataset, 2, num_workers=1))
            trainer.create_train_dataloader = lambda *_: own
        trainer.train(dataset, 1, None, 2, train_dataloader_kwargs=kwargs)
    finally:
        gc.enable()
    gc.collect()
    assert finalised.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_in_a_dataset_does_not_end_the_epoch(workers):
    class Ending(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise StopIteration
            return super().__getitem__(index)

    trainer = make_trainer()
    with pytest.raises(RuntimeError, match=r"^generator raised StopIteration") as caught:
        train(trainer, train_dataset=Ending(make_data(8)), train_dataloader_kwargs={"num_workers": workers})
    assert isinstance(caught.value.__cause__, StopIteration)


class Unpicklable(Rows):
    def __getitem__(self, index):
        return *super().__getitem__(index), lambda: index


def _first_two(samples: list[Any]) -> Any:
    return *(torch.stack(column) for column in list(zip(*samples, strict=True))[:2]), samples


@pytest.mark.parametrize("seed", [None, 1])
def test_a_batch_that_no_worker_can_send_is_an_error(seed):
    data = Unpicklable(make_data())
    trainer = make_trainer(seed=seed)
    with pytest.raises(Exception, match=r"(?s)[Pp]ickle.*worker cannot send this batch.* num_workers=0"):
        train(trainer, train_dataset=data, collate_fn=_first_two, train_dataloader_kwargs={"num_workers": 1})
    train(trainer, train_dataset=data, collate_fn=_first_two, train_dataloader_kwargs={"num_workers": 0})


class WithReader(Rows):
    """Its inputs are the process that reads them."""

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return torch.full_like(inputs, os.getpid()), targets


def test_workers_start_anew_if_nothing_compares_the_data(monkeypatch):
    monkeypatch.setattr(DATA_MARKS, "content", None)
    readers = []
    watch = listener(on_train_step_end=lambda trainer, batch, **_: readers.append(int(batch[0].max())))
    loader = DataLoader(WithReader(float64_data(4)), 4, num_workers=1, persistent_workers=True)
    adamw_trainer(float64_model(), callbacks=[watch]).train(loader, 2)
    assert readers[0] != readers[1]
