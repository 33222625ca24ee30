"""The data of several processes: order, randomness, streams, samplers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.data_loader import IterableDatasetShard
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import LimitBatchesCallback
from pytorch_accel_lite.data import OwnShard
from tests.cases.common import OrderedStream, Recorder, global_batch, rank, shared_folder, world_size
from tests.tasks import Rows, quiet_trainer, regression_data, small_model, weights


class NoisyRows(Rows):
    """Augmentation with all three generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(5) + np.random.randn() + random.random(), y


def shuffled_order() -> Any:
    """Ranks whose own generators differ agree on an order; each sample is seen once in an epoch."""
    results = {}
    data = regression_data(23)
    tagged = TensorDataset(torch.arange(23, dtype=torch.float64)[:, None].expand(-1, 5).contiguous(), data.tensors[1])
    for seed in (None, 5):
        for name, dataset in (("memory", tagged), ("rows", Rows(tagged))):
            torch.manual_seed(1 + rank())
            recorder = Recorder()
            trainer = quiet_trainer(small_model(), callbacks=[recorder], seed=seed)
            trainer.train(dataset, 2, per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 0})
            results[seed, name] = [batch[:, 0].tolist() for batch in recorder.inputs]
    sampler = WeightedRandomSampler(torch.ones(23), 23)
    torch.manual_seed(1 + rank())
    recorder = Recorder()
    trainer = quiet_trainer(small_model(), callbacks=[recorder])
    trainer.train(tagged, 1, per_device_batch_size=2, train_dataloader_kwargs={"sampler": sampler})
    results["weighted"] = [batch[:, 0].tolist() for batch in recorder.inputs]
    return results


def seeded_augmentation() -> Any:
    """With a seed, the same weights for 0, 1 and 2 workers, whatever the number of processes."""
    results = {}
    for workers in (0, 1, 2):
        model = small_model()
        trainer = quiet_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), seed=3)
        trainer.train(
            NoisyRows(regression_data(26)),
            2,
            per_device_batch_size=global_batch(6),
            train_dataloader_kwargs={"num_workers": workers},
        )
        results[workers] = weights(model)
    return results


class Stream(IterableDataset):
    def __init__(self, size):
        self.data = regression_data(size)

    def __iter__(self):
        order = list(range(len(self.data)))
        random.shuffle(order)  # differs from rank to rank
        return (self.data[index] for index in order)


def streams() -> Any:
    """An iterable dataset is dealt out; own shards of unequal length are used up without a hang."""
    results = {}
    random.seed(rank())
    for size in (1, 7, 24):
        recorder = Recorder()
        trainer = quiet_trainer(small_model(), callbacks=[recorder])
        trainer.train(Stream(size), 2, per_device_batch_size=2, gradient_accumulation_steps=2)
        results["stream", size] = torch.cat(recorder.inputs) if recorder.inputs else torch.empty(0, 5)
        results["updates", size] = trainer.progress.update

    class OwnShards(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            mine = TensorDataset(*(tensor[rank() :: world_size()] for tensor in self.train_dataset.tensors))
            keep = len(mine) if rank() == 0 else 1
            return OwnShard(DataLoader(TensorDataset(*(t[:keep] for t in mine.tensors)), batch_size))

    recorder = Recorder()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = OwnShards(model, nn.MSELoss(), optimizer, callbacks=[recorder])
    trainer.train(regression_data(20), 2, per_device_batch_size=2)
    results["own"] = {
        "inputs": torch.cat(recorder.inputs),
        "weights": weights(model),
        "updates": trainer.progress.update,
        "samples": trainer.progress.samples,
    }
    return results


class SavesEachUpdate(TrainerCallback):
    saves_training_states = True

    def __init__(self, folder):
        self.folder = folder

    def on_train_step_checkpoint(self, trainer, **kwargs):
        trainer.save_training_state(self.folder / str(trainer.progress.update))


class OwnOfSix(Trainer):
    """Six batches of each process."""

    samples = 2

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        mine = [tensor[rank() :: world_size()].split(self.samples) for tensor in self.train_dataset.tensors]
        return list(zip(*mine, strict=True))


class OwnOfLarger(OwnOfSix):
    samples = 3


class OwnOfOne(OwnOfSix):
    """Batches of the first process alone."""

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return [] if rank() else super().create_train_dataloader(batch_size, train_dl_kwargs)


def resumed_streams() -> Any:
    """Streams go on with other batch sizes, own batches after as many as there were; both may have too few."""
    results = {}

    def run(name, data, batch_size, callbacks=(), trainer_class=Trainer, **kwargs):
        recorder, model = Recorder(), small_model()
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
        data, fewer = regression_data(50), regression_data(5)
        saving = SavesEachUpdate(folder / "of a stream")
        run("stream", OrderedStream(data), 4, [saving])
        run("stream with other batches", OrderedStream(data), 5, resume_from=saving.folder / "2")
        run("stream of fewer", OrderedStream(fewer), 4, resume_from=saving.folder / "2")
        saving, limit = SavesEachUpdate(folder / "of own"), LimitBatchesCallback(4)
        data, fewer = regression_data(12 * world_size()), regression_data(2 * world_size())
        run("own", data, 1, [saving, limit], OwnOfSix)
        run("own again", data, 1, [limit], OwnOfSix, resume_from=saving.folder / "2")
        run("own of fewer", fewer, 1, [limit], OwnOfSix, resume_from=saving.folder / "2")
        run("own of larger", data, 1, [], OwnOfLarger, resume_from=saving.folder / "2")
        run("own of one", data, 1, [], OwnOfOne)
        run("empty stream", OrderedStream([]), 1)
    return results


class LengthBuckets:
    """A batch sampler with batches of different sizes."""

    def __iter__(self):
        yield from ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])

    def __len__(self):
        return 5


def batch_sampler() -> Any:
    recorder, model = Recorder(), small_model()
    trainer = quiet_trainer(model, callbacks=[recorder])
    trainer.train(
        regression_data(11), 2, per_device_batch_size=2, train_dataloader_kwargs={"batch_sampler": LengthBuckets()}
    )
    return {"sizes": recorder.counts, "samples": trainer.progress.samples, "updates": trainer.progress.update}


class EndlessOrder:
    """Draws from a generator that differs from rank to rank."""

    def __iter__(self):
        while True:
            yield random.randrange(50)


def sampler_without_an_end() -> Any:
    """Without a seed all take their share of what the first draws."""
    random.seed(rank())
    seen = []

    class Keep(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            seen.append(trainer.batch_indices)

    trainer = quiet_trainer(small_model(), callbacks=[Keep])
    data, sampler = regression_data(50), EndlessOrder()
    kwargs = {"train_dataloader_kwargs": {"sampler": sampler}, "per_device_batch_size": global_batch(120)}
    trainer.train(data, max_num_train_steps=20, **kwargs)
    random.seed(0)
    return {"seen": seen, "drawn": [random.randrange(50) for _ in range(20 * 120)]}


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
        if number % world_size() == rank():
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
    trainer = quiet_trainer(small_model(), callbacks=[recorder])
    with redirect_stdout(text):
        trainer.train(stream, 2, stream, per_device_batch_size=2)
    return {
        "inputs": torch.cat(recorder.inputs) if recorder.inputs else torch.empty(0, 5),
        "samples": trainer.progress.samples,
        "losses": trainer.run_history.to_dict()["eval_loss_epoch"],
        "weights": weights(trainer.model),
        "printed": text.getvalue(),
    }


def streams_that_share_themselves_out() -> Any:
    """Each epoch has all samples once, of streams of which each process has a part, and of one that gives all."""
    data = list(regression_data(24))
    split = SplitStream(data, Part(rank(), world_size()))
    results = {
        "split": read_by_training(split),
        "reading": read_by_training(Reading(SplitStream(data, Part(rank(), world_size())))),
        "reading from a dict": read_by_training(Named({"all": SplitStream(data, Part(rank(), world_size()))})),
        "shard": read_by_training(
            IterableDatasetShard(OrderedStream(data), 2, num_processes=world_size(), process_index=rank())
        ),
        "webdataset": read_by_training(Pipeline(data, split_by_node)),
        "pipe": read_by_training(IterableWrapper(data).sharding_filter()),
        "whole": read_by_training(SplitStream(data, None)),
    }
    return {"by stream": results, "epochs": split.epochs}


def hugging_face_streams() -> Any:
    """Split by their own function, by shards and by samples; and left whole."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    x, y = regression_data(24).tensors
    rows = Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    results = {}
    for name, num_shards in (("by shards", 6), ("by samples", 5), ("whole", 6)):
        stream = rows.to_iterable_dataset(num_shards=num_shards).shuffle(seed=1, buffer_size=4)
        if name != "whole":
            stream = split_dataset_by_node(stream, rank(), world_size())
        results[name] = read_by_training(Pairs(stream))
    return results


class Pairs(Reading):
    def __iter__(self):
        return (
            (torch.tensor(row["x"], dtype=torch.float64), torch.tensor(row["y"], dtype=torch.float64))
            for row in self.stream
        )

    def set_epoch(self, epoch):
        self.stream.set_epoch(epoch)


def streams_shared_out_wrongly() -> Any:
    """What is said of parts that are not those of the processes."""
    data, said = list(regression_data(24)), {}
    for name, stream in {
        "the same on all": SplitStream(data, Part(0, world_size())),
        "for others": SplitStream(data, Part(rank(), world_size() + 1)),
        "on some": SplitStream(data, None if rank() == 0 else Part(rank(), world_size())),
        "pipe": IterableWrapper(data),
    }.items():
        try:
            read_by_training(stream)
        except ValueError as error:
            said[name] = str(error)
    return said


def hugging_face_tables() -> dict[str, str]:
    """What is said of tables that were split, or shuffled otherwise, on each process; and of the same on all."""
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
        trainer = quiet_trainer(model)
        try:
            trainer.train(table, 1, collate_fn=lambda rows: [torch.stack([row[k] for row in rows]) for k in "xy"])
            said[name] = "trained"
        except ValueError as error:
            said[name] = str(error)
    return said


class NormalisedRows(nn.Sequential):
    """Batch norm over rows, which torch refuses to train on a single one."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__(nn.Linear(5, 4), norm(4), nn.Tanh(), nn.Linear(4, 1))
        self.double()


class CountsRows(TrainerCallback):
    """Keeps the samples of each step, and how many rows the model saw."""

    def __init__(self):
        self.indices = []
        self.rows = []

    def on_train_step_end(self, trainer, batch, **kwargs):
        self.indices.append(trainer.batch_indices)
        self.rows.append(len(batch[0]))


def tails_with_batch_norm() -> Any:
    """For each size the samples of every step of this process, and the rows that it computed; what was warned of."""
    results = {}
    for size in (38, 40, 43, 47, 4 * world_size() * 3 + 1):
        for name, model in (("norm", NormalisedRows()), ("none", small_model())):
            counts = CountsRows()
            trainer = quiet_trainer(model, callbacks=[counts], seed=1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    trainer.train(regression_data(size), 1, per_device_batch_size=4)
                    error = ""
                except ValueError as failure:
                    error = str(failure)
            said = [str(w.message) for w in caught if "batch norm" in str(w.message)]
            results[size, name] = {"indices": counts.indices, "rows": counts.rows, "said": said, "error": error}
    return results


def batches_of_a_sampler_with_batch_norm() -> Any:
    """A batch with a single sample beside larger ones."""
    counts = CountsRows()
    trainer = quiet_trainer(NormalisedRows(), callbacks=[counts])
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11]]
    trainer.train(regression_data(12), 1, train_dataloader_kwargs={"batch_sampler": batches})
    return counts.indices, counts.rows
