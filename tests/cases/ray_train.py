"""Runs that report to Ray Train, by a stand-in for what it offers to its workers: a cluster takes long to start."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pytorch_accel_lite import TrainerCallback
from tests.cases.common import rank, shared_folder, world_size
from tests.launching import ROOT
from tests.tasks import quiet_trainer, regression_data, small_model, weights

SIZE, EPOCHS = 20, 3


class Checkpoint:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    from_directory = classmethod(lambda cls, path: cls(path))

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        yield self.path


class StandIn(ModuleType):
    """``ray.train`` in a worker, with a storage in a folder."""

    Checkpoint = Checkpoint

    def __init__(self, storage: Path, workers: int, preempted: bool = False) -> None:
        super().__init__("ray.train")
        self.storage, self.workers, self.preempted = storage, workers, preempted
        self.reports: list[dict[str, Any]] = []

    def get_context(self) -> Any:
        return self

    def get_world_size(self) -> int:
        if not self.workers:
            raise RuntimeError("not in a worker")
        return self.workers

    def get_checkpoint(self) -> Checkpoint | None:
        found = sorted(self.storage.glob("checkpoint_*"))
        return Checkpoint(found[-1]) if found else None

    def get_preemption_info(self) -> object | None:
        return object() if self.preempted else None

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
        self.reports.append(metrics)
        if checkpoint is not None:
            number = len(list(self.storage.glob("checkpoint_*")))
            shutil.copytree(checkpoint.path, self.storage / f"checkpoint_{number:03d}")
        if world_size() > 1:
            torch.distributed.barrier()


class Fails(TrainerCallback):
    def on_train_step_end(self, trainer: Any, step: int, **kwargs: Any) -> None:
        if trainer.progress.epoch == 2 and step == 1:
            raise OSError("a machine is gone")


def train(ray: StandIn, *callbacks: TrainerCallback, **kwargs: Any) -> Any:
    """Train in a worker, or resume; return the trainer."""
    from pytorch_accel_lite.integrations import RayReportCallback

    sys.modules |= {"ray": ModuleType("ray"), "ray.train": ray}
    try:
        trainer = quiet_trainer(small_model(), callbacks=[*callbacks, RayReportCallback(**kwargs)], seed=3)
        data = regression_data(SIZE)
        trainer.train(data, EPOCHS, per_device_batch_size=4 // world_size(), resume_from="latest")
        return trainer
    finally:
        del sys.modules["ray"], sys.modules["ray.train"]


def resumed() -> tuple[list[Any], list[dict[str, torch.Tensor]], list[str]]:
    """The metrics reported before and after all workers fail, the weights of this run and of another, and states."""
    with shared_folder() as folder:
        before, after = (StandIn(folder, world_size()) for _ in range(2))
        with suppress(OSError):
            train(before, Fails())
        if world_size() > 1:
            torch.distributed.barrier()
        ended = weights(train(after).get_model())
        whole = quiet_trainer(small_model(), seed=3)
        whole.train(regression_data(SIZE), EPOCHS, per_device_batch_size=4 // world_size())
        states = sorted(path.name for path in folder.glob("checkpoint_*"))
        return [before.reports, after.reports], [ended, weights(whole.get_model())], states


def stopped_for_fewer(folder: str) -> None:
    """Train until all workers fail."""
    with suppress(OSError):
        train(StandIn(Path(folder), world_size()), Fails(), every_n_steps=1)


def without_shared_disk() -> str:
    """What is said if the first worker's directory is not there on the others."""
    with shared_folder() as folder:
        os.environ["TMPDIR"] = str(folder)
        is_dir = Path.is_dir
        Path.is_dir = lambda path: is_dir(path) and not (rank() and "ray_report_" in path.name)
        try:
            train(StandIn(folder, world_size()))
        except RuntimeError as error:
            return str(error)
        finally:
            Path.is_dir = is_dir
            torch.distributed.barrier()
    return ""


def example_without_ray(epochs: int) -> str:
    """The hash of the weights that the example trains, without Ray."""
    return runpy.run_path(str(ROOT / "examples" / "ray_train.py"))["train"]([], epochs)
