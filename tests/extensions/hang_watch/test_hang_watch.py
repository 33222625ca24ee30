"""HangWatchCallback: hanging and slow processes are named."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.callbacks import HangWatchCallback
from pytorch_accel_lite.distributed.ranks import timeout_of
from tests.launching import EarlyFork, Fork, run_elastic_script
from tests.ranks import IN_ORDER, rank, world_size
from tests.scripts.resumable import run_to_the_end
from tests.small_models import Rows, adamw_trainer, equal_weights, float64_data, float64_model, listener, weights


class Stuck(Rows):
    """A dataset that reads one sample very slowly: the one that the last rank gets in its fourth step."""

    def load_sample(self, index: int) -> Any:
        if index == 3 * world_size() + world_size() - 1:
            time.sleep(1.2)
        return self.data[index]

    def __getitem__(self, index: int) -> Any:
        return self.load_sample(index)


class LeavesEarly(TrainerCallback):
    """Fails on the last rank, for which the others wait before they fail."""

    def on_train_step_end(self, trainer: Any, step: int, **kwargs: Any) -> None:
        if step == 2:
            if rank() < world_size() - 1:
                trainer.barrier()
            raise OSError("no disk")


class LooksAtTimeouts(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[timedelta] = []

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        self.seen.append(timeout_of(dist.group.WORLD))


def stuck_while_reading(**kwargs: Any) -> dict[str, torch.Tensor]:
    """Train with a watch on data that are stuck once."""
    model = float64_model()
    trainer = adamw_trainer(model, callbacks=[HangWatchCallback(0.3, **kwargs)])
    data = Stuck(float64_data(6 * world_size()))
    trainer.train(data, 1, per_device_batch_size=1, train_dataloader_kwargs=IN_ORDER | {"num_workers": 0})
    return weights(model)


@pytest.mark.slow
def test_a_slow_step_is_reported_with_its_place_and_stack(capsys):
    stuck_while_reading()
    said = capsys.readouterr().err
    assert "No progress for 0.3 seconds." in said
    assert re.search(r"^  rank 0, epoch 1, step 3: in load_sample of test_hang_watch.py:\d+$", said, re.MULTILINE)
    assert re.search(r"Stack of rank 0:\n(.*\n)*.*in load_sample\n +time.sleep\(1.2\)", said)
    assert re.search(r"Rank 0 makes progress again after \d+ seconds\.", said)


def test_all_processes_are_named_those_that_are_behind_first(ranks):
    results = ranks(stuck_while_reading)
    last = ranks.world_size - 1
    others = "rank 0" if last == 1 else f"ranks {', '.join(map(str, range(last)))}"
    behind = rf"  rank {last}, epoch 1, step 3: in load_sample of test_hang_watch.py:\d+\n"
    waiting = rf"  {others}, epoch 1, step 3: in _engine_run_backward of graph.py:\d+\n"
    assert re.search(behind + waiting, results.output)
    assert all(equal_weights(results[0], weights) for weights in results)


def one_has_left() -> None:
    """Train while the last rank has an error of its own, and joins the others later."""
    trainer = adamw_trainer(float64_model(), callbacks=[LeavesEarly(), HangWatchCallback(0.3)])
    with suppress(OSError):
        trainer.train(float64_data(6 * world_size()), 1, per_device_batch_size=1)
    if rank() == world_size() - 1:
        time.sleep(1)
        trainer.barrier()


def test_a_process_that_has_left_the_run_is_named_with_its_error(two_ranks):
    lines = two_ranks(one_has_left).output.splitlines()
    place = lines.index("  rank 1 has left the run: OSError: no disk")
    assert lines[place + 1].startswith("  rank 0, epoch 1, step 3: in barrier of gather_and_broadcast.py:")
    assert lines[place + 1].partition(", called by ")[2].startswith("on_train_step_end of test_hang_watch.py:")


def timeouts() -> tuple[list[timedelta], timedelta]:
    """How long collectives may take at the start of each step, and after the run."""
    looks = LooksAtTimeouts()
    trainer = adamw_trainer(float64_model(), callbacks=[looks, HangWatchCallback(50, end=True)])
    trainer.train(float64_data(3 * world_size()), 1, per_device_batch_size=1)
    return looks.seen, timeout_of(dist.group.WORLD)


def test_the_timeout_of_collectives_is_lowered_and_restored(two_ranks):
    for within, after in two_ranks(timeouts):
        assert within == [after, timedelta(seconds=130), timedelta(seconds=130)]
        assert after > timedelta(seconds=130)


@pytest.mark.thorough
@pytest.mark.processes
def test_a_job_that_hangs_ends_itself_and_resumes_its_bits(tmp_path, two_ranks, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    folder = tmp_path / "hung"
    folder.mkdir()
    done = run_elastic_script(2, "tests/extensions/hang_watch/hanging.py", str(folder), max_restarts=1)
    assert done.returncode == 0, done.stdout
    assert re.search(r"  rank 1, epoch 2, step \d: in on_train_step_end of hanging.py:\d+", done.stdout)
    assert "The job ends with exit code 75." in done.stdout
    two_ranks.run(run_to_the_end, tmp_path / "whole")
    hung, whole = (torch.load(path / "final.pt", weights_only=False) for path in (folder, tmp_path / "whole"))
    assert equal_weights(hung["weights"], whole["weights"])
    assert hung["order"] == whole["order"]


@pytest.mark.slow
def test_a_hanging_program_ends_itself_if_requested(tmp_path):
    output = tmp_path / "output"
    process = EarlyFork(partial(stuck_while_reading, end=True), output)
    assert process.wait() == 75
    assert output.read_text().endswith("The job ends with exit code 75.\n")


@pytest.mark.slow
def test_before_the_first_update_a_hang_is_only_reported(tmp_path):
    slow = listener(on_train_step_start=lambda t, **_: time.sleep(2.5 if not t.progress.update else 0))
    output = tmp_path / "output"

    def train():
        trainer = adamw_trainer(float64_model(), callbacks=[slow, HangWatchCallback(2, end=True)])
        trainer.train(float64_data(6), 1, per_device_batch_size=3)
        print(f"{trainer.progress.update} updates")

    assert Fork(train, output).wait() == 0, output.read_text()  # a process that may be ended
    assert "No progress for 2 seconds." in output.read_text()
    assert output.read_text().endswith("2 updates\n")


@pytest.mark.parametrize("seconds", [0, -1, "60", float("nan")])
def test_the_hang_watch_refuses_bad_times(seconds):
    with pytest.raises((TypeError, ValueError), match=f"seconds={seconds!r} must be (greater than 0|a number)"):
        HangWatchCallback(seconds)
