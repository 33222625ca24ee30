"""Continuing within an epoch of a stream, or of batches of unknown size."""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.data import shard
from tests.loaders import rank_of
from tests.ranks import OrderedStream, Recorder, shared_folder
from tests.ranks import rank as own_rank
from tests.ranks import world_size as job_size
from tests.small_models import float64_data, float64_model
from tests.streams import SavesEachUpdate


class OwnOfSix(Trainer):
    """Six batches of each process."""

    samples = 2

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        mine = [tensor[own_rank() :: job_size()].split(self.samples) for tensor in self.train_dataset.tensors]
        return list(zip(*mine, strict=True))


class OwnOfLarger(OwnOfSix):
    samples = 3


class OwnOfOne(OwnOfSix):
    """Batches of the first process alone."""

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return [] if own_rank() else super().create_train_dataloader(batch_size, train_dl_kwargs)


class Counting(Trainer):
    """Records numbers, and reports a given number of samples."""

    count = staticmethod(len)
    saves_attributes = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def calculate_train_batch_loss(self, batch):
        self.seen.append(batch[0].tolist())
        return {"loss": self.model(batch[0][:, None]).mean(), "batch_size": self.count(batch[0])}


class Numbers(IterableDataset):
    def __init__(self, size: int, batch_size: int | None = None) -> None:
        values = torch.arange(size, dtype=torch.float32)
        self.items = [(x,) for x in (values if batch_size is None else values.split(batch_size))]

    def __iter__(self):
        return iter(self.items)


def seen_batches(source: Any, batch_size: int, count: Any = len, callbacks: Any = (), **kwargs: Any) -> list[Any]:
    """Train an epoch on a stream, or on a loader of one's own, and return what the steps were given."""

    class Own(Counting):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return source

    model = nn.Linear(1, 1)
    trainer_class = Counting if isinstance(source, IterableDataset) else Own
    trainer = trainer_class(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks, seed=0)
    trainer.count = count
    trainer.train(source, 1, per_device_batch_size=batch_size, **kwargs)
    return trainer.seen


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("source", "kwargs"),
    [(Numbers(30, 5), {"train_dataloader_kwargs": {"batch_size": None}}), (Numbers(30, 5).items, {})],
)
@pytest.mark.parametrize("count", [len, lambda x: 2, lambda x: 7])
@pytest.mark.filterwarnings("ignore:The resumed run had counted")
def test_an_epoch_continues_after_its_steps_however_counted(tmp_path, source, kwargs, count):
    whole = seen_batches(source, 5, count, [SavesEachUpdate(tmp_path)], **kwargs)
    assert len(whole) == 6
    for update in range(1, 6):
        assert seen_batches(source, 5, count, resume_from=tmp_path / f"{update}", **kwargs) == whole[update:]


class Bare:
    """A batch whose size only the step knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getitem__(self, index):
        return [self.x][index]


def test_an_epoch_of_batches_of_unknown_size_continues(tmp_path):
    source = [Bare(x) for x in torch.arange(30.0).split(5)]
    whole = seen_batches(source, 5, callbacks=[SavesEachUpdate(tmp_path)])
    assert len(whole) == 6
    assert seen_batches(source, 5, resume_from=tmp_path / "4") == whole[4:]


def test_packed_samples_are_counted_by_the_batch_size(tmp_path):
    def pack(samples):
        return [torch.cat([x.repeat(3) for (x,) in samples])]

    def run(**kwargs):
        return seen_batches(Numbers(30), 5, lambda x: len(x) // 3, collate_fn=pack, **kwargs)

    whole = run(callbacks=[SavesEachUpdate(tmp_path)])
    assert run(resume_from=tmp_path / "4") == whole[4:]


def test_steps_that_were_counted_differently_are_warned_of(tmp_path):
    seen_batches(Numbers(30, 5).items, 5, callbacks=[SavesEachUpdate(tmp_path)])
    with pytest.warns(UserWarning, match=r"had counted 15 samples in 3 steps of this epoch, but .* now holds 30"):
        seen_batches(Numbers(40, 10).items, 5, resume_from=tmp_path / "3")


@pytest.mark.parametrize("batch_size", [3, 4, 9])
def test_a_stream_continues_with_another_batch_size(tmp_path, batch_size):
    seen_batches(Numbers(30), 8, callbacks=[SavesEachUpdate(tmp_path)])
    rest = seen_batches(Numbers(30), batch_size, resume_from=tmp_path / "2")
    assert [i for batch in rest for i in batch] == [*range(16, 30)]


def test_other_workers_or_batches_of_workers_are_warned_of():
    def loader_with(workers: int, batch_size: int) -> Any:
        source = DataLoader(Numbers(14), batch_size, num_workers=workers)
        return shard(source, rank_of(0, 1), torch.device("cpu"), seed=1, training=True)

    for before, now in [((0, 2), (2, 2)), ((2, 2), (1, 2)), ((2, 2), (2, 3)), ((1, 2), (0, 3)), ((2, 2), (2, 2))]:
        loader = loader_with(*now)
        loader.restore_epoch_state(loader_with(*before).epoch_state())
        match = rf"num_workers={before[0]} with batch_size={before[1]} .* num_workers={now[0]} .*={now[1]} now"
        warns = max(before[0], now[0]) > 1 and before != now
        with pytest.warns(UserWarning, match=match) if warns else nullcontext():
            loader.steps(1, start=6, steps_done=3)


def test_resuming_an_unsuitable_stream_is_explained(tmp_path):
    seen_batches(Numbers(30), 8, callbacks=[SavesEachUpdate(tmp_path)])
    with pytest.raises(ValueError, match=r"data ended after 1 batches of this epoch, but .* already seen 2\."):
        seen_batches(Numbers(8), 8, resume_from=tmp_path / "2")
    with pytest.raises(ValueError, match=r"data ended after 15 samples of this epoch, but .* already seen 16"):
        seen_batches(Numbers(15), 5, resume_from=tmp_path / "2")
    with pytest.raises(ValueError, match="in the middle of a batch of type deque, which cannot be split"):
        seen_batches(
            Numbers(30),
            5,
            resume_from=tmp_path / "2",
            collate_fn=lambda rows: deque([torch.stack(*zip(*rows, strict=True))]),
        )


def resumed_streams() -> Any:
    """Streams go on with other batch sizes, own batches after as many as there were; both may have too few."""
    from pytorch_accel_lite.callbacks import LimitBatchesCallback

    results = {}

    def run(name, data, batch_size, callbacks=(), trainer_class=Trainer, **kwargs):
        recorder, model = Recorder(), float64_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = trainer_class(model, nn.MSELoss(), optimizer, callbacks=[recorder, *callbacks], seed=0)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*give other batches than when")  # those of fewer do
                trainer.train(data, 1, per_device_batch_size=batch_size, **kwargs)
        except (ValueError, RuntimeError) as error:
            results[name] = str(error)
        else:
            results[name] = recorder.inputs

    with shared_folder() as folder:
        data, fewer = float64_data(50), float64_data(5)
        saving = SavesEachUpdate(folder / "of a stream")
        run("stream", OrderedStream(data), 4, [saving])
        run("stream with other batches", OrderedStream(data), 5, resume_from=saving.folder / "2")
        run("stream of fewer", OrderedStream(fewer), 4, resume_from=saving.folder / "2")
        saving, limit = SavesEachUpdate(folder / "of own"), LimitBatchesCallback(4)
        data, fewer = float64_data(12 * job_size()), float64_data(2 * job_size())
        run("own", data, 1, [saving, limit], OwnOfSix)
        run("own again", data, 1, [limit], OwnOfSix, resume_from=saving.folder / "2")
        run("own of fewer", fewer, 1, [limit], OwnOfSix, resume_from=saving.folder / "2")
        run("own of larger", data, 1, [], OwnOfLarger, resume_from=saving.folder / "2")
        run("own of one", data, 1, [], OwnOfOne)
        run("empty stream", OrderedStream([]), 1)
    return results


@pytest.mark.extension("pytorch_accelerated")
@pytest.mark.thorough
@pytest.mark.processes
def test_streams_and_own_batches_continue_on_several_processes(ranks):
    results = ranks(resumed_streams)
    done = 2 * 4 * ranks.world_size
    expected = sorted(float64_data(50).tensors[0][done:, 0].tolist())
    found = [x for result in results for batch in result["stream with other batches"] for x in batch[:, 0].tolist()]
    assert sorted(found) == expected
    for result in results:
        assert len(result["own"]) == 4
        assert torch.equal(torch.cat(result["own again"]), torch.cat(result["own"][2:]))
        assert (
            f"data ended after 5 samples of this epoch, but the resumed run had already seen {done}"
            in result["stream of fewer"]
        )
        assert "data ended after" in result["own of fewer"]
        assert "in the middle of the batches of several processes, which cannot be split" in result["own of larger"]
        assert "train_dataset gave no batch" in result["empty stream"]
        others = ranks.world_size - 1
        assert f"{others} of {ranks.world_size} processes have no training batch at all" in result["own of one"]
