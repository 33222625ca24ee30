"""A dataset that fails, or with an argument has its process killed, on one rank only."""

import os
import signal
import sys

import torch

from tests.tasks import Rows, quiet_trainer, regression_data, small_model


class Fails(Rows):
    def __getitem__(self, index):
        if index == 7 and sys.argv[1:]:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 7:
            raise OSError("sample 7 cannot be read")
        return super().__getitem__(index)


torch.set_num_threads(1)
trainer = quiet_trainer(small_model())
assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"]) == 2
trainer.train(Fails(regression_data(40)), 2, per_device_batch_size=2, train_dataloader_kwargs={"shuffle": False})
