"""The data of several processes: order, randomness, streams, samplers."""

from __future__ import annotations

import random

from torch.utils.data import IterableDataset

from pytorch_accel_lite import TrainerCallback
from tests.tasks import regression_data


class Stream(IterableDataset):
    def __init__(self, size):
        self.data = regression_data(size)

    def __iter__(self):
        order = list(range(len(self.data)))
        random.shuffle(order)  # differs from rank to rank
        return (self.data[index] for index in order)


class SavesEachUpdate(TrainerCallback):
    saves_training_states = True

    def __init__(self, folder):
        self.folder = folder

    def on_train_step_checkpoint(self, trainer, **kwargs):
        trainer.save_training_state(self.folder / str(trainer.progress.update))


class LengthBuckets:
    """A batch sampler with batches of different sizes."""

    def __iter__(self):
        yield from ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])

    def __len__(self):
        return 5
