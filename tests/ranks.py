"""What functions that run on several ranks have in common (see ``rank_pool.py``)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from pytorch_accel_lite import TrainerCallback

IN_ORDER = {"shuffle": False}


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Give a folder that the ranks share, and remove it once all are done."""
    made = [tempfile.mkdtemp() if rank() == 0 else None]
    if world_size() > 1:
        dist.broadcast_object_list(made)
    folder = Path(made[0])
    yield folder
    if world_size() > 1:
        dist.barrier()
    if rank() == 0:
        shutil.rmtree(folder)


class Recorder(TrainerCallback):
    """Keeps the gradients of each update and the samples of each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.inputs: list[torch.Tensor] = []
        self.counts: list[int] = []

    def on_optimizer_step_start(self, trainer, **kwargs):
        named = trainer.get_model().named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named})

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        if batch_output["batch_size"]:
            self.inputs.append(batch[0])
            self.counts.append(batch_output["batch_size"])


def global_batch(size: int) -> int:
    assert size % world_size() == 0
    return size // world_size()


class OrderedStream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)
