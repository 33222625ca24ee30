"""Processes that wait for one another, and what is said of that."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.callbacks import AdviceCallback, HangWatchCallback, SaveTrainingStateCallback
from pytorch_accel_lite.distributed.ranks import timeout_of
from tests.cases import parallel
from tests.cases.common import IN_ORDER, rank, world_size
from tests.tasks import Rows, own_clock, quiet_trainer, regression_data, small_model, weights


class Stuck(Rows):
    """A dataset that reads one sample very slowly: the one that the last rank gets in its fourth step."""

    def load_sample(self, index: int) -> Any:
        if index == 3 * world_size() + world_size() - 1:
            time.sleep(1.2)
        return self.data[index]

    def __getitem__(self, index: int) -> Any:
        return self.load_sample(index)


def stuck_while_reading(num_workers: int = 0, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Train with a watch on data that are stuck once."""
    model = small_model()
    trainer = quiet_trainer(model, callbacks=[HangWatchCallback(0.3, **kwargs)])
    data = Stuck(regression_data(6 * world_size()))
    trainer.train(data, 1, per_device_batch_size=1, train_dataloader_kwargs=IN_ORDER | {"num_workers": num_workers})
    return weights(model)


class LeavesEarly(TrainerCallback):
    """Fails on the last rank, for which the others wait before they fail."""

    def on_train_step_end(self, trainer: Any, step: int, **kwargs: Any) -> None:
        if step == 2:
            if rank() < world_size() - 1:
                trainer.barrier()
            raise OSError("no disk")


def one_has_left() -> None:
    """Train while the last rank has an error of its own, and joins the others later."""
    trainer = quiet_trainer(small_model(), callbacks=[LeavesEarly(), HangWatchCallback(0.3)])
    with suppress(OSError):
        trainer.train(regression_data(6 * world_size()), 1, per_device_batch_size=1)
    if rank() == world_size() - 1:
        time.sleep(1)
        trainer.barrier()


class LooksAtTimeouts(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[timedelta] = []

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        self.seen.append(timeout_of(dist.group.WORLD))


def timeouts() -> tuple[list[timedelta], timedelta]:
    """How long collectives may take at the start of each step, and after the run."""
    looks = LooksAtTimeouts()
    trainer = quiet_trainer(small_model(), callbacks=[looks, HangWatchCallback(50, end=True)])
    trainer.train(regression_data(3 * world_size()), 1, per_device_batch_size=1)
    return looks.seen, timeout_of(dist.group.WORLD)


def timeouts_of_own_groups(folder: Path, timeout: timedelta) -> list[timedelta]:
    """How long a collective may take in each group that a trainer has made, in a job with such a timeout."""
    given = InitProcessGroupKwargs(backend="gloo", timeout=timeout)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[given])
    model = parallel.shard(parallel.create_model(), "tp")  # which makes groups of its own
    before = [*dist.distributed_c10d._world.pg_map]
    saving = SaveTrainingStateCallback(folder, asynchronous=True)
    parallel.fit(quiet_trainer(model, callbacks=[saving], accelerator=accelerator), "tp", epochs=1)
    return [timeout_of(group) for group in dist.distributed_c10d._world.pg_map if group not in before]


def _slow_to(read: float, compute: float) -> None:
    """Train while each sample and each forward pass takes this many seconds on rank 1; on others, a pass takes 1 ms."""

    class Slow(Rows):
        def __getitem__(self, index: int) -> Any:
            spend(read if rank() == 1 else 0.0)
            return super().__getitem__(index)

    model = small_model()
    model.register_forward_pre_hook(lambda *_: spend(compute if rank() == 1 else 0.001))
    trainer = quiet_trainer(model, callbacks=[AdviceCallback(min_seconds=0.05)])
    data = Slow(regression_data(30 * world_size()))
    with own_clock() as spend:
        trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 0})


def slow_to_read() -> None:
    _slow_to(0.01, 0.001)


def slow_to_compute() -> None:
    _slow_to(0.0, 0.02)
