"""Streams on several processes: dealt out by rank 0, or divided into parts."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import OwnShard, shard
from pytorch_accel_lite.distributed import Ranks
from tests.launching import SOAK
from tests.ranks import OrderedStream, Recorder
from tests.ranks import rank as own_rank
from tests.ranks import world_size as job_size
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model, listener, same_bits, weights
from tests.streams import Keeps, SavesEachUpdate, ShuffledSamples, Sums, source, train_on


class Part(NamedTuple):
    rank: int
    world_size: int


class SplitStream(IterableDataset):
    """Gives one part of the rows, as Hugging Face's streams do after split_dataset_by_node."""

    def __init__(self, data, part):
        self.data = data
        self._distributed = part
        self.epochs = []

    def __iter__(self):
        part = self._distributed
        return iter([self.data[i] for i in range(part.rank, len(self.data), part.world_size)] if part else self.data)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def split_by_node(rows):
    for number, row in enumerate(rows):
        if number % job_size() == own_rank():
            yield row


class Pipeline(IterableDataset):
    """Passes rows through stages, as webdataset's pipelines do."""

    def __init__(self, *stages):
        self.pipeline = list(stages)

    def __iter__(self):
        rows, *stages = self.pipeline
        for stage in stages:
            rows = stage(rows)
        return iter(rows)


class Reading(IterableDataset):
    """A dataset of the user's own around a stream."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        return iter(self.stream)


class Named(IterableDataset):
    """A dataset of the user's own around streams by name."""

    def __init__(self, streams):
        self.streams = streams

    def __iter__(self):
        return chain.from_iterable(self.streams.values())


def read_by_training(stream: Any) -> dict[str, Any]:
    recorder, text = Recorder(), StringIO()
    trainer = adamw_trainer(float64_model(), callbacks=[recorder])
    with redirect_stdout(text):
        trainer.train(stream, 2, stream, per_device_batch_size=2)
    return {
        "inputs": torch.cat(recorder.inputs) if recorder.inputs else torch.empty(0, 5),
        "samples": trainer.progress.samples,
        "losses": trainer.run_history.to_dict()["eval_loss_epoch"],
        "weights": weights(trainer.model),
        "printed": text.getvalue(),
    }


class Pairs(Reading):
    def __iter__(self):
        return (
            (torch.tensor(row["x"], dtype=torch.float64), torch.tensor(row["y"], dtype=torch.float64))
            for row in self.stream
        )

    def set_epoch(self, epoch):
        self.stream.set_epoch(epoch)


class Note:
    """Something in a batch that is not a tensor, but holds one."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __eq__(self, other):
        return torch.equal(self.tensor, other.tensor)


class Mixed(IterableDataset):
    """Batches of all kinds of values, of which no two have the same size."""

    def __len__(self):
        return 7

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for number in range(7):
            x = torch.rand(2 + number % 3, 5 * number + 1, generator=generator, dtype=torch.float64)
            yield {
                "x": x.mT.contiguous().mT[:, : number + 1],
                "names": ["a" * number, "b"],
                "note": Note(x.sum()),
                "half": x.bfloat16(),
                "mask": x > 0.5,
                "none": torch.empty(2, 0),
                "sparse": torch.eye(number + 1).to_sparse(),
                "rows": x.numpy(),
            }


class Fails(IterableDataset):
    """Numbers, after some of which reading fails."""

    def __init__(self, numbers, good):
        self.numbers, self.good = numbers, good

    def __iter__(self):
        for number in self.numbers:
            if number == self.good:
                raise OSError(f"no number {number}")
            yield torch.tensor([float(number), 0.0])

    def shard(self, rank, world_size):
        return Fails(self.numbers[rank::world_size], self.good)


class CannotBeOpened(IterableDataset):
    """Data that fail on the second process before the first sample."""

    def __iter__(self):
        if own_rank() == 1:
            raise OSError("no file")
        return iter(torch.ones(6, 2))


class Counted:
    """Batches of two samples, without a length, of which some have been read."""

    def __init__(self, count, beside):
        self.count, self.beside, self.read = count, beside, 0

    def __iter__(self):
        for number in range(self.count):
            self.read += 1
            yield torch.full((2, 2), float(number)), self.beside


class Draws(Sums):
    """Its steps draw random numbers."""

    def calculate_train_batch_loss(self, batch):
        self.log("numpy", np.random.rand())
        self.log("python", random.random())
        return super().calculate_train_batch_loss(batch)


pytestmark = pytest.mark.processes


def numbers_in(results: Any, begin: int = 0) -> list[int]:
    return [int(x) for result in results for batch in result["seen"][begin:] for x in batch[:, 0]]


def require_datasets() -> None:
    pytest.importorskip("datasets")
    if int(version("datasets").partition(".")[0]) < 5:
        pytest.skip("datasets before 5.0 skips samples when it returns to a position")


@pytest.mark.soak
@pytest.mark.parametrize(
    "kind",
    [
        "cut",
        *["forgetful cut", pytest.param("blocks of cut", marks=pytest.mark.extension("shuffled_streams"))] * SOAK,
        pytest.param("mixture of cut", marks=[pytest.mark.extension("mixtures"), pytest.mark.thorough]),
    ],
)
def test_each_process_reads_its_part_of_a_divisible_stream(two_ranks, tmp_path, kind):
    """31 numbers are 16 and 15: after five steps of three, the second process has none left."""
    whole = two_ranks.run(train_on, kind, tmp_path, size=31)
    every = [*range(31), *range(100, 131)] if kind.startswith("mixture") else [*range(31)]
    assert sorted(numbers_in(whole)) == sorted(every * 2)
    for rank, result in enumerate(whole):
        assert sorted(result["read"]) == [x for x in sorted(every * 2) if x % 2 == rank]
    said = "Each process reads its own part of the training data, as sharded by "
    assert [said in result["printed"] for result in whole] == [True, False]
    steps = len(whole[0]["seen"]) // 2
    for update in (2, steps - 1, steps, steps + 3):
        resumed = two_ranks.run(train_on, kind, resume_from=tmp_path / f"{update}", size=31)
        for before, after in zip(whole, resumed, strict=True):
            seen = min(update, len(before["seen"]) // 2) + max(update - steps, 0)
            assert same_bits(after["seen"], before["seen"][seen:])
            assert equal_weights(after["weights"], before["weights"])
        if kind == "cut":
            assert sum(len(result["read"]) for result in resumed) <= len(numbers_in(resumed)) + 15


@pytest.mark.thorough
def test_hugging_faces_streams_are_divided_by_their_shards(two_ranks, tmp_path):
    require_datasets()
    whole = two_ranks.run(train_on, "six shards", tmp_path)
    assert sorted(whole[0]["read"] + whole[1]["read"]) == sorted(numbers_in(whole))  # none is read by both
    assert sorted(numbers_in(whole)) == sorted([*range(26)] * 2)
    assert "as sharded by split_dataset_by_node (IterableDataset)" in whole[0]["printed"]
    resumed = two_ranks.run(train_on, "six shards", resume_from=tmp_path / "2")
    for before, after in zip(whole, resumed, strict=True):
        assert same_bits(after["seen"], before["seen"][2:])
        assert equal_weights(after["weights"], before["weights"])
    alone = train_on("six shards", resume_from=tmp_path / "2")
    seen = [{"seen": result["seen"][:2]} for result in whole]
    assert sorted(numbers_in(seen) + numbers_in([alone])) == sorted([*range(26)] * 2)
    three = two_ranks.run(train_on, "hugging face")  # three shards, for two processes
    assert sorted(numbers_in(three)) == sorted([*range(26)] * 2)
    assert three[0]["printed"] == ""


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["forgetful cut", *["cut"] * SOAK])
def test_any_number_of_processes_completes_a_divided_stream(two_ranks, job, tmp_path, kind):
    first = {}
    for processes in (1, 2, 3):
        folder = tmp_path / f"{processes}"
        folder.mkdir()
        saved = (
            [train_on(kind, folder, size=31)] if processes == 1 else job(processes).run(train_on, kind, folder, size=31)
        )
        first[processes] = numbers_in([{"seen": result["seen"][:2]} for result in saved])
    again = tmp_path / "again"
    again.mkdir()
    for before, after, folder in ((2, 1, None), (1, 2, None), (3, 2, again), (2, 3, None)):
        kwargs = {"resume_from": tmp_path / f"{before}" / "2", "size": 31, "folder": folder}
        resumed = [train_on(kind, **kwargs)] if after == 1 else job(after).run(train_on, kind, **kwargs)
        assert Counter(numbers_in(resumed) + first[before]) == Counter([*range(31)] * 2)
        said = f"This epoch was read in {before} parts, one by each process."
        assert (said in resumed[0]["printed"]) == (before > 1)
    # A run that has completed parts of others is interrupted, too.
    update = 3
    seen = first[3] + numbers_in(
        [{"seen": r["seen"][:1]} for r in job(2).run(train_on, kind, resume_from=tmp_path / "3" / "2", size=31)]
    )
    for after in (3, 1):
        kwargs = {"resume_from": again / f"{update}", "size": 31}
        resumed = [train_on(kind, **kwargs)] if after == 1 else job(after).run(train_on, kind, **kwargs)
        assert Counter(numbers_in(resumed) + seen) == Counter([*range(31)] * 2)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["cut", "forgetful cut"])
def test_the_rest_of_divided_streams_keeps_its_noise(two_ranks, tmp_path, kind):
    whole = two_ranks.run(train_on, kind, tmp_path, size=31)
    alone = train_on(kind, resume_from=tmp_path / "2", size=31)
    left = [torch.cat(result["seen"])[6:size].tolist() for result, size in zip(whole, (16, 15), strict=True)]
    assert sorted(torch.cat(alone["seen"])[: 31 - 12].tolist()) == sorted(left[0] + left[1])


def random_steps(kind: str, folder: Any = None, resume_from: Any = None) -> torch.Tensor:
    """The numbers that the steps of an epoch draw; states are saved in ``folder``, if given."""
    model, drawn = nn.Linear(2, 1), []
    keeping = listener(
        on_train_step_end=lambda trainer, **_: drawn.append([*map(float, trainer.step_metrics.values())])
    )
    callbacks = [keeping] if folder is None else [keeping, SavesEachUpdate(folder)]
    trainer = Draws(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=callbacks, seed=5)
    stream, kwargs = source(kind, 48, [])
    with redirect_stdout(StringIO()):
        trainer.train(stream, 1, per_device_batch_size=3, train_dataloader_kwargs=kwargs, resume_from=resume_from)
    return torch.tensor(drawn)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["cut", "shelf"])
def test_reading_ahead_changes_no_random_numbers_of_steps(two_ranks, tmp_path, kind):
    whole = two_ranks.run(random_steps, kind, tmp_path)
    assert not torch.equal(whole[0], whole[1])
    for update in (1, 3, 6):
        resumed = two_ranks.run(random_steps, kind, resume_from=tmp_path / f"{update}")
        for after, before in zip(resumed, whole, strict=True):
            assert torch.equal(after, before[update:])


@pytest.mark.parametrize("size", [1, 2])
def test_a_process_with_an_empty_part_waits_for_the_others(ranks, size):
    found = ranks.run(train_on, "cut", size=size)
    assert sorted(numbers_in(found)) == sorted([*range(size)] * 2)
    assert all(equal_weights(result["weights"], found[0]["weights"]) for result in found)


def dealt_batches() -> Any:
    """The batches dealt to each process in training and in evaluation, by kind of batch."""
    found = {}
    loader = DataLoader(Mixed(), None)
    for training in (True, False):
        loaded = shard(loader, Ranks(Accelerator(cpu=True)), torch.device("cpu"), seed=None, training=training)
        found[training] = [*loaded.steps(1)]
    largest = [
        [x.untyped_storage().nbytes() / max(x.nbytes, 1) for x in (b.data["x"], b.data["note"].tensor)]
        for b in found[True]
    ]
    return found, largest


def check_data(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that a batch of ``Mixed`` has arrived as it was."""
    assert found.keys() == expected.keys()
    assert (found["rows"] == expected["rows"]).all()
    for key in expected.keys() - {"rows"}:
        if isinstance(expected[key], torch.Tensor):
            assert torch.equal(found[key].to_dense(), expected[key].to_dense())
            assert found[key].dtype == expected[key].dtype
        else:
            assert found[key] == expected[key]


def test_batches_of_any_kind_are_dealt(ranks):
    """A rank without a batch of its own gets the first of the step, of which no sample counts."""
    expected = list(Mixed())
    n = ranks.world_size
    groups = [expected[start : start + n] for start in range(0, len(expected), n)]
    for rank, (found, storage) in enumerate(ranks(dealt_batches)):
        own = expected[rank::n]
        assert [len(found[True]), len(found[False])] == [len(groups), len(own)]
        for step, batch in chain(enumerate(found[True]), enumerate(found[False])):
            has_own = rank < len(groups[step])
            right = groups[step][rank if has_own else 0]
            assert batch.num_samples == len(right["x"]) * has_own
            assert batch.total_samples == sum(len(other["x"]) for other in groups[step])
            assert batch.is_last == (step == len(groups) - 1)
            check_data(batch.data, right)
        assert rank == 0 or max(small for _, small in storage) <= 2  # small values do not keep messages alive


def failing_streams() -> dict[str, Any]:
    """The number of steps, and the error, when one process cannot read."""
    found = {}
    all_numbers = [*range(24)]
    streams = {
        "dealt": DataLoader(Reading(Fails(all_numbers, 17)), 2),
        "dealt at once": DataLoader(Reading(Fails(all_numbers, 0)), 2),
        "divided": DataLoader(Fails(all_numbers, 17), 2),
        "own": OwnShard(DataLoader(Fails([*range(8)], 6 if own_rank() == 1 else None), 2)),
        "cannot be opened": OwnShard(DataLoader(CannotBeOpened(), 2)),
        "without samples": Reading([torch.ones(2, 2), torch.ones(0, 2), torch.ones(2, 2)]),
        "no batch at all": [[1, 2]] if own_rank() else [torch.ones(2, 2)],
    }
    for name, stream in streams.items():
        model, keeps = nn.Linear(2, 1), Keeps()
        trainer = Sums(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=[keeps], seed=0)
        trainer.create_train_dataloader = lambda *_, stream=stream: stream
        with redirect_stdout(StringIO()):
            try:
                trainer.train(all_numbers, 1)
            except Exception as error:
                found[name] = len(keeps.seen), f"{type(error).__name__}: {error}"
    return found


def test_a_stream_error_on_one_process_ends_the_run_on_all(two_ranks):
    for rank, found in enumerate(two_ranks(failing_streams)):
        of_reader = "OSError: " if rank == 0 else "OSError: Rank 0 failed: OSError: "
        of_second = "OSError: " if rank == 1 else "OSError: Rank 1 failed: OSError: "
        assert found["dealt"] == (2, f"{of_reader}no number 17")
        assert found["dealt at once"] == (0, f"{of_reader}no number 0")
        assert found["divided"] == (3, f"{of_second}no number 17")
        assert found["own"] == (2, f"{of_second}no number 6")
        assert found["cannot be opened"] == (0, f"{of_second}no file")
        assert found["without samples"][1].startswith("ValueError: calculate_train_batch_loss returned batch_size=0")
        assert "Rank 1 failed: ValueError: The batch size" in found["no batch at all"][1] or rank == 1


def read_ahead() -> dict[str, Any]:
    """How many batches have been read but not used after each step, of batches with something small or large inside."""
    found = {}
    beside = {
        "small": torch.zeros(4),
        "large": torch.zeros(()).expand(2**23),  # 32 MiB, if they were separate
        "sparse": torch.sparse_coo_tensor([[0], [0]], [1.0], (2**12, 2**12)),
    }

    class OwnBatches(Sums):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return self.train_dataset

        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss(batch[0])

    class Looks(Keeps):
        def on_train_step_end(self, trainer, batch, **kwargs):
            super().on_train_step_end(trainer, batch[0])
            ahead.append(batches.read - trainer.progress.step)

    for name, extra in beside.items():
        ahead: list[int] = []
        batches, looks = Counted(50 - 7 * own_rank(), extra), Looks()
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        OwnBatches(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=[looks]).train(batches, 1)
        found[name] = {"ahead": ahead, "seen": looks.seen, "weights": weights(model)}
    return found


def test_the_smaller_the_batches_the_further_ahead_they_are_read(two_ranks):
    for rank, found in enumerate(two_ranks(read_ahead)):
        assert max(found["small"]["ahead"]) == 9
        assert max(found["large"]["ahead"]) == max(found["sparse"]["ahead"]) == 3
        for name in found:
            assert found[name]["ahead"][0] == 2  # it does not start with many
            assert len(found[name]["ahead"]) == 50
            assert [int(x[0, 0]) for x in found[name]["seen"]] == [*range(50 - 7 * rank)]
            assert equal_weights(found[name]["weights"], found["small"]["weights"])


def streams_within_streams() -> Any:
    """Streams of every kind are evaluated and predicted in the steps of another; the weights of a run on each."""
    found = {}

    class Looks(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            for name in ("shelf", "cut"):
                stream, _ = source(name, 7, [])
                trainer.evaluate(stream, per_device_batch_size=2)
                predicted = trainer.predict(source(name, 5, [])[0], per_device_batch_size=2)
                assert torch.equal(predicted[:, 0], torch.arange(5.0))

    class Looked(Sums):
        def calculate_eval_batch_loss(self, batch):
            return self.calculate_train_batch_loss(batch)

        def calculate_predict_batch_output(self, batch):
            return batch

    for name in ("shelf", "cut", "own part"):
        for callbacks in ([], [Looks()]):
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            trainer = Looked(model, None, optimizer, callbacks=callbacks, seed=5)
            trainer.own_part = name == "own part"
            with redirect_stdout(StringIO()):
                trainer.train(
                    source(name, 13, [])[0], 2 if SOAK else 1, per_device_batch_size=2, train_dataloader_kwargs={}
                )
            found[name, bool(callbacks)] = weights(model)
    return found


@pytest.mark.thorough
@pytest.mark.soak
def test_streams_are_evaluated_while_another_is_read(two_ranks):
    for found in two_ranks(streams_within_streams):
        for name in ("shelf", "cut", "own part"):
            assert equal_weights(found[name, False], found[name, True]), name


def read_streams() -> Any:
    """An iterable dataset is dealt out; own shards of unequal length are used up without a hang."""
    results = {}
    random.seed(own_rank())
    for size in (1, 7, 24):
        recorder = Recorder()
        trainer = adamw_trainer(float64_model(), callbacks=[recorder])
        trainer.train(ShuffledSamples(size), 2, per_device_batch_size=2, gradient_accumulation_steps=2)
        results["stream", size] = torch.cat(recorder.inputs) if recorder.inputs else torch.empty(0, 5)
        results["updates", size] = trainer.progress.update

    class OwnShards(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            mine = TensorDataset(*(tensor[own_rank() :: job_size()] for tensor in self.train_dataset.tensors))
            keep = len(mine) if own_rank() == 0 else 1
            return OwnShard(DataLoader(TensorDataset(*(t[:keep] for t in mine.tensors)), batch_size))

    recorder = Recorder()
    model = float64_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = OwnShards(model, nn.MSELoss(), optimizer, callbacks=[recorder])
    trainer.train(float64_data(20), 2, per_device_batch_size=2)
    results["own"] = {
        "inputs": torch.cat(recorder.inputs),
        "weights": weights(model),
        "updates": trainer.progress.update,
        "samples": trainer.progress.samples,
    }
    return results


def test_a_stream_is_divided_once_into_equal_update_counts(ranks):
    results = ranks(read_streams)
    for size in (1, 7, 24):
        expected = float64_data(size).tensors[0].repeat(2, 1)
        seen = torch.cat([result["stream", size] for result in results])
        assert torch.equal(seen.sort(0).values, expected.sort(0).values)
        assert len({result["updates", size] for result in results}) == 1


def test_unequal_own_shards_are_read_without_a_hang(ranks):
    own = [result["own"] for result in ranks(read_streams)]
    first = len(range(0, 20, ranks.world_size))
    assert [len(result["inputs"]) for result in own] == [2 * first, *[2] * (ranks.world_size - 1)]
    assert {result["samples"] for result in own} == {2 * (first + ranks.world_size - 1)}
    assert {result["updates"] for result in own} == {2 * -(-first // 2)}
    assert all(equal_weights(result["weights"], own[0]["weights"]) for result in own)


def streams_that_share_themselves_out() -> Any:
    """Each epoch has all samples once, of streams of which each process has a part, and of one that gives all."""
    data = list(float64_data(24))
    split = SplitStream(data, Part(own_rank(), job_size()))
    results = {
        "split": read_by_training(split),
        "reading": read_by_training(Reading(SplitStream(data, Part(own_rank(), job_size())))),
        "reading from a dict": read_by_training(Named({"all": SplitStream(data, Part(own_rank(), job_size()))})),
        "shard": read_by_training(
            IterableDatasetShard(OrderedStream(data), 2, num_processes=job_size(), process_index=own_rank())
        ),
        "webdataset": read_by_training(Pipeline(data, split_by_node)),
        "pipe": read_by_training(IterableWrapper(data).sharding_filter()),
        "whole": read_by_training(SplitStream(data, None)),
    }
    return {"by stream": results, "epochs": split.epochs}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["split", "reading", "reading from a dict", "shard", "webdataset", "pipe", "whole"])
def test_self_sharding_streams_are_read_by_each_process(ranks, kind):
    found = [result["by stream"][kind] for result in ranks(streams_that_share_themselves_out)]
    assert_each_sample_once(found)
    assert bool(found[0]["printed"]) == (kind != "whole")
    assert all(result["printed"] == "" for result in found[1:])
    if kind != "whole":
        said = "Each process reads its own part of the {} data, as sharded by "
        assert all(said.format(which) in found[0]["printed"] for which in ("training", "evaluation"))


def test_set_epoch_is_called_on_the_stream_of_each_process(ranks):
    for result in ranks(streams_that_share_themselves_out):
        assert set(result["epochs"]) == {0, 1}


def hugging_face_streams() -> Any:
    """Split by their own function, by shards and by samples; and left whole."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    x, y = float64_data(24).tensors
    rows = Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    results = {}
    for name, num_shards in (("by shards", 6), ("by samples", 5), ("whole", 6)):
        stream = rows.to_iterable_dataset(num_shards=num_shards).shuffle(seed=1, buffer_size=4)
        if name != "whole":
            stream = split_dataset_by_node(stream, own_rank(), job_size())
        results[name] = read_by_training(Pairs(stream))
    return results


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["by shards", "by samples", "whole"])
def test_streams_split_by_hugging_face_are_read_by_each_process(ranks, kind):
    pytest.importorskip("datasets")
    found = [result[kind] for result in ranks(hugging_face_streams)]
    assert_each_sample_once(found)
    assert ("split_dataset_by_node" in found[0]["printed"]) == (kind != "whole")
    own = found[0]["inputs"]
    assert not torch.equal(own[: len(own) // 2], own[len(own) // 2 :])  # shuffled again


def streams_shared_out_wrongly() -> Any:
    """The errors for parts that do not match the processes."""
    data, said = list(float64_data(24)), {}
    for name, stream in {
        "the same on all": SplitStream(data, Part(0, job_size())),
        "for others": SplitStream(data, Part(own_rank(), job_size() + 1)),
        "on some": SplitStream(data, None if own_rank() == 0 else Part(own_rank(), job_size())),
        "pipe": IterableWrapper(data),
    }.items():
        try:
            read_by_training(stream)
        except ValueError as error:
            said[name] = str(error)
    return said


def test_streams_not_sharded_over_the_processes_are_refused(ranks):
    n = ranks.world_size
    for said in ranks(streams_shared_out_wrongly):
        assert ", ".join([f"part 0 of {n}"] * n) in said["the same on all"]
        assert f"part 0 of {n + 1}, part 1 of {n + 1}" in said["for others"]
        assert f"all, part 1 of {n}" in said["on some"]
        assert f"each sample would be read {n} times. Add .sharding_filter()" in said["pipe"]


def assert_each_sample_once(found):
    """In each of two epochs, and in evaluation."""
    x, _ = float64_data(24).tensors
    assert torch.equal(torch.cat([result["inputs"] for result in found]).sort(0).values, x.repeat(2, 1).sort(0).values)
    model = float64_model()
    for result in found:
        assert result["samples"] == 48
        assert result["losses"] == found[0]["losses"]
        assert equal_weights(result["weights"], found[0]["weights"])
    model.load_state_dict(found[0]["weights"])
    whole = adamw_trainer(model).evaluate(float64_data(24))["evaluation_loss"]
    assert found[0]["losses"][-1] == pytest.approx(whole, abs=1e-10)
