"""One of two ranks fails in its first steps; how, and which, are the arguments."""

import os
import signal
import sys

import torch

from pytorch_accel_lite import TrainerCallback
from tests.small_models import Rows, adamw_trainer, float64_data, float64_model

how = sys.argv[1] if sys.argv[1:] else "fails"
failing_rank = int(sys.argv[2]) if sys.argv[2:] else 1
IN_ORDER = {"shuffle": False, "num_workers": 0}


class Fails(Rows):
    def __getitem__(self, index):
        if index == (5, 7)[failing_rank] and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == (5, 7)[failing_rank] and how != "exits":
            raise OSError(f"sample {index} cannot be read")
        return super().__getitem__(index)


class Exits(TrainerCallback):
    def on_train_step_end(self, trainer, **kwargs):
        if how == "exits" and trainer.ranks.rank == failing_rank:
            sys.exit(3)


torch.set_num_threads(1)
trainer = adamw_trainer(float64_model(), callbacks=[Exits])
assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"]) == 2
try:
    trainer.train(Fails(float64_data(40)), 2, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER)
except OSError as error:
    if how != "caught":
        raise
    print("has caught:", error, flush=True)
    sys.exit(3)
