"""Helpers for functions that run on several ranks (see ``rank_pool.py``)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import some_of
from tests.small_models import equal_weights, largest_difference, weights

IN_ORDER = {"shuffle": False}


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a temporary folder that the ranks share."""
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

    saves_attributes = False  # only of the current run

    def __init__(self) -> None:
        self.gradients: list[Any] = []
        self.inputs: list[Any] = []
        self.counts: list[Any] = []

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


def every_state(folder: Path | None) -> list[SaveTrainingStateCallback]:
    """A callback that saves the state after each update, or an empty list without a folder."""
    return [] if folder is None else [SaveTrainingStateCallback(folder, save_every_n_steps=1, max_checkpoints=None)]


def final_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return weights(trainer.get_model())


def run_and_resume(train: Callable[..., Any], result: Callable[[Any], Any] = final_weights) -> list[Any]:
    """Return the result of a run, followed by those of runs resumed from some of its states.

    Args:
        train: ``train(folder, resume_from=...)`` returns a trainer that has saved the state after each update
    """
    with shared_folder() as folder:
        results = [result(train(folder / "whole"))]
        if world_size() > 1:
            dist.barrier()
        states = sorted((folder / "whole").glob("update-*"))
        for state in some_of(states[:-1]):
            results.append(result(train(folder / f"from {state.name}", resume_from=state)))
    return results


def check_processes(
    ranks: Any, train: Callable[..., Any], result: Callable[[Any], Any] = final_weights, resumed: int = 3
) -> list[list[dict[str, torch.Tensor]]]:
    """Check that several processes train as one does, and resume to the same bits; return the results by rank.

    Args:
        ranks: the job, see ``rank_pool.py``
        train: see ``run_and_resume()``
        resumed: the minimum number of resumed runs
    """
    alone = run_and_resume(train, result)
    by_rank = ranks.run(run_and_resume, train, result)
    assert all(equal_weights(runs[0], by_rank[0][0]) for runs in by_rank)
    for whole, *others in (alone, *by_rank):
        assert largest_difference(whole, alone[0]) < 1e-12
        assert len(others) >= resumed
        assert all(equal_weights(other, whole) for other in others)
    return by_rank
