"""Users' iterables that draw random numbers: compared with a plain loop, killed and resumed."""

from __future__ import annotations

import runpy
import signal
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import ROOT, EarlyFork, only_with_soak, run_elastic_script, run_forked, some_of
from tests.scripts.own_iterable import EPOCHS, by_hand, train
from tests.small_models import equal_weights

SCRIPT = "tests/scripts/own_iterable.py"


@pytest.mark.parametrize("kind", ["shuffles", "at once", "generator", "lengths"])
def test_an_iterable_that_shuffles_itself_equals_a_plain_loop(kind):
    assert equal_weights(train(kind), by_hand(kind))


def ended(folder: Path, processes: int, kind: str, seed: int, kill_at: int) -> list[dict[str, Any]]:
    """Run the script until it ends, killed once at an update, and return what each process ended with."""
    folder.mkdir()
    arguments = [str(folder), kind, str(seed), str(kill_at)]
    if processes == 1:
        start = partial(runpy.run_path, str(ROOT / SCRIPT), None, "__main__")
        codes = [run_forked(start, *arguments, kind=EarlyFork).returncode for _ in range(2 if kill_at else 1)]
        assert codes == [*[-signal.SIGKILL] * (len(codes) - 1), 0]
    else:
        done = run_elastic_script(processes, SCRIPT, *arguments, max_restarts=1)
        assert done.returncode == 0, done.stdout
        assert ("Resuming from" in done.stdout) == bool(kill_at)
    ends = [torch.load(folder / f"final{rank}.pt") for rank in range(processes)]
    assert all(end["processes"] == processes for end in ends)
    return ends


@pytest.mark.thorough
@pytest.mark.programs
@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "seed"), some_of(some_of(product(["shuffles", "at once", "lengths", "draws"], [-1, 5])))
)
def test_a_killed_run_on_an_iterable_that_draws_resumes_its_bits(tmp_path, kind, seed):
    check_resumed(tmp_path, 1, kind, seed)


@only_with_soak
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "seed"), [("draws", 5), ("shuffles", -1), ("lengths", 5)])
def test_two_processes_on_iterables_that_draw_resume_their_bits(tmp_path, kind, seed, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    check_resumed(tmp_path, 2, kind, seed)


def check_resumed(folder: Path, processes: int, kind: str, seed: int) -> None:
    per_epoch = 8 // processes
    killed_at = 2 * per_epoch - 1
    whole = ended(folder / "whole", processes, kind, seed, 0)
    resumed = ended(folder / "resumed", processes, kind, seed, killed_at)
    for before, after in zip(whole, resumed, strict=True):
        assert len(before["seen"]) == EPOCHS * per_epoch
        left = len(after["seen"])  # the state of the last update may not have been whole on all processes
        assert left - EPOCHS * per_epoch + killed_at in (0, 1)
        for name in ("seen", "drawn"):
            assert after[name] == before[name][-left:]
        assert equal_weights(after["weights"], before["weights"])


def train_and_save(kind: str, folder: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    return train(kind, [SaveTrainingStateCallback(folder, save_every_n_steps=1, max_checkpoints=None)], **kwargs)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [5, None])
def test_an_iterable_that_draws_from_its_own_generator_resumes(tmp_path, seed):
    whole = train_and_save("generator", tmp_path, seed=seed)
    state = tmp_path / "update-000000011"
    assert equal_weights(train_and_save("generator", tmp_path / "again", seed=seed, resume_from=state), whole)


def test_a_resumed_run_warns_if_an_iterable_gives_other_batches(tmp_path):
    train_and_save("in place", tmp_path)
    with pytest.warns(UserWarning, match="The training data, a ShufflesInPlace, give other batches than when"):
        train_and_save("in place", tmp_path / "again", resume_from=tmp_path / "update-000000011")
