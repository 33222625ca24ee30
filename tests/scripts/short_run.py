"""Short runs with everything on: of trainers that are closed in every way, or of one that is not."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.utils import local_process_zero_only
from tests.small_models import float64_data, float64_model

torch.set_num_threads(1)
# Before there is a trainer, which makes a process of this one.
print(f"the first: {local_process_zero_only(lambda: True)() is True}", flush=True)
how = sys.argv[1]


def make() -> Trainer:
    model = float64_model()
    return Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))


def run(trainer: Trainer) -> None:
    trainer.train(float64_data(40), 2, float64_data(9), per_device_batch_size=4)
    trainer.predict(float64_data(5))
    print(f"two processes: {trainer.accelerator.num_processes == 2}", flush=True)


if how == "closed":
    with make() as trainer:
        run(trainer)
    first, second = make(), make()
    first.close()
    run(second)
    second.close()
    second.close()
else:
    run(make())
assert dist.is_initialized()  # the job is left when the program ends
