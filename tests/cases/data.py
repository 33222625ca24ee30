"""The data of several processes: order, randomness, streams, samplers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

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
