"""Several trainers and savers in one job: one after another, side by side, and what they leave behind."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch

from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import verify_state
from tests.launching import two_are_enough
from tests.ranks import shared_folder
from tests.small_models import adamw_trainer, float64_data, float64_model

pytestmark = pytest.mark.processes


def threads_and_descriptors() -> tuple[int, int]:
    gc.collect()  # takes long: a trainer and its callbacks refer to each other
    threads = []
    for _ in range(20):  # the system counts a thread for a moment after it was joined
        threads.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.02)
    return min(threads), len(os.listdir("/proc/self/fd"))


def mean_weights_of_trainers_in_turn() -> Any:
    """One trainer after another, each in a block of its own, as for folds of a cross-validation."""
    means = []
    for _ in range(2):
        model = float64_model()
        with adamw_trainer(model) as trainer:
            trainer.train(float64_data(12), 1)
            means.append(trainer.gather(torch.tensor([float(model[0].weight.detach().mean())])).tolist())
    return means


@two_are_enough
def test_a_trainer_can_follow_another_that_was_closed(ranks):
    for means in ranks(mean_weights_of_trainers_in_turn):
        assert len(means) == 2
        assert all(len(set(fold)) == 1 and len(fold) == ranks.world_size for fold in means)


def what_many_trainers_leave() -> Any:
    """Threads and file descriptors after 3 and after 20 trainers that were made, trained, saved and dropped."""
    saved, counts = set(), []
    with shared_folder() as folder:
        for number in range(20):
            saving = SaveTrainingStateCallback(folder / f"states {number}", asynchronous=True)
            trainer = adamw_trainer(float64_model(), callbacks=[saving], seed=0)
            trainer.train(float64_data(8), 1, per_device_batch_size=2)
            saved.add(len(list((folder / f"states {number}").glob("update-*"))))
            del trainer, saving
            if number in (2, 19):
                counts.append(threads_and_descriptors())
    return saved, counts


@pytest.mark.thorough
@two_are_enough
def test_trainers_leave_no_threads_and_no_open_files(ranks):
    for saved, (after_3, after_20) in ranks(what_many_trainers_leave):
        assert saved == {1}
        # Fewer if something that an earlier function of this job has left ends meanwhile.
        assert all(now <= before for now, before in zip(after_20, after_3, strict=True)), (after_3, after_20)


def states_of_savers_side_by_side() -> list[list[int]]:
    """The numbers of processes in the states of two trainers, each with two savers that write at the same moments."""
    found = []
    with shared_folder() as folder:
        for number in range(2):
            savers = [
                SaveTrainingStateCallback(folder / f"{number} {name}", 1, 1, max_checkpoints=None, asynchronous=True)
                for name in ("first", "second")
            ]
            trainer = adamw_trainer(float64_model(), callbacks=savers, seed=0)
            trainer.train(float64_data(24), 2, per_device_batch_size=2)
            paths = [path for saver in savers for path in saver.save_dir.glob("update-*")]
            found.append([verify_state(path)["world_size"] for path in paths])
        trainer.barrier()
    return found


@pytest.mark.thorough
@two_are_enough
def test_several_savers_can_write_in_the_background_at_once(ranks):
    for found in ranks(states_of_savers_side_by_side):
        states = 2 * 2 * 24 // (2 * ranks.world_size)
        assert found == [[ranks.world_size] * states] * 2
