"""Goodput: how a job's time is spent over its restarts, and saving states within a time budget."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import contextmanager
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import pytest

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import some_of
from tests.ranks import global_batch, rank, shared_folder, world_size
from tests.small_models import Rows, adamw_trainer, equal_weights, float64_data, float64_model, listener, weights


class Clock:
    """A fake clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    @contextmanager
    def instead(self) -> Any:
        clocks = [patch.object(time, name, lambda: self.now) for name in ("monotonic", "perf_counter")]
        clocks.append(patch.object(time, "time", lambda: 1.7e9 + self.now))
        with clocks[0], clocks[1], clocks[2]:
            yield self


@pytest.fixture
def clock() -> Any:
    with Clock().instead() as clock:
        yield clock


class SlowRows(Rows):
    """Rows that take 0.25 seconds to read."""

    def __init__(self, data: Any, clock: Clock) -> None:
        super().__init__(data)
        self.clock = clock

    def __getitem__(self, index: int) -> Any:
        self.clock.spend(0.25)
        return super().__getitem__(index)


class SlowState(TrainerCallback):
    """A state that takes some seconds to copy."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds

    def state_dict(self) -> dict[str, Any]:
        self.clock.spend(self.seconds)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def run(clock: Clock, folder: Any, *callbacks: Any, epochs: int = 2, **kwargs: Any) -> Any:
    """Six updates of four samples in an epoch, each of which takes a second; an evaluation takes ten."""
    slow = listener(
        on_training_run_start=lambda trainer, **kwargs: clock.spend(5),
        on_update_end=lambda trainer, **kwargs: clock.spend(1),
        on_eval_epoch_end=lambda trainer, **kwargs: clock.spend(10),
    )
    states = SaveTrainingStateCallback(folder, save_every_n_steps=3, save_at_end=False)
    trainer = adamw_trainer(float64_model(), callbacks=[slow, SlowState(clock, 0.5), states, *callbacks], seed=1)
    data = {"train_dataset": SlowRows(float64_data(24), clock), "eval_dataset": float64_data(9)}
    trainer.train(
        num_epochs=epochs, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0}, **data, **kwargs
    )
    return trainer


WHOLE = {
    "starting": 5.0,
    "training": 12.0,
    "data": 12.0,
    "evaluation": 20.0,
    "saving": 4 * 0.5,
    "takeover": 0.0,
    "lost": 0.0,
    "down": 0.0,
}


def test_every_second_is_counted_once(clock, tmp_path):
    trainer = run(clock, tmp_path)
    assert trainer.goodput.seconds == pytest.approx(WHOLE)
    total = sum(WHOLE.values())
    assert total == pytest.approx(clock.now - 1000)
    assert trainer.goodput.fractions == pytest.approx({kind: value / total for kind, value in WHOLE.items()})
    assert sum(trainer.goodput.fractions.values()) == pytest.approx(1)
    clock.spend(100)
    trainer.evaluate(float64_data(9))
    assert trainer.goodput.seconds == pytest.approx(WHOLE), "the run is over"
    assert str(trainer.goodput) == "evaluation 39.2%, training 23.5%, data 23.5%, starting 9.8%, saving 3.9%"


def test_saving_within_an_evaluation_is_counted_once(clock, tmp_path):
    def save(trainer: Any, **kwargs: Any) -> None:
        clock.spend(10)
        trainer.save_checkpoint(tmp_path / "weights.pt")

    model = float64_model()
    model.register_state_dict_pre_hook(lambda *_: clock.spend(3))
    trainer = adamw_trainer(model, callbacks=[listener(on_eval_epoch_end=save)])
    trainer.train(float64_data(4), 2, eval_dataset=float64_data(4))
    assert trainer.goodput.seconds == dict.fromkeys(WHOLE, 0.0) | {"evaluation": 20.0, "saving": 6.0}


@pytest.mark.parametrize("update", [3, 6, 9])
def test_a_restart_adds_the_lost_time_and_the_time_down(clock, tmp_path, update):
    whole = run(clock, tmp_path / "whole")
    folder = tmp_path / "killed"
    state = tmp_path / "whole" / f"update-{update:09d}"
    shutil.copytree(state, folder / state.name)
    saved_at = json.loads((state / "manifest.json").read_text())["saved_at"]
    (folder / ".lock").write_text("1234\n")
    os.utime(folder / ".lock", (saved_at + 4, saved_at + 4))  # when the job showed its last sign of life
    clock.now = saved_at - 1.7e9 + 34
    trainer = run(clock, folder, resume_from="latest")
    seconds = trainer.goodput.seconds
    assert equal_weights(weights(trainer.model), weights(whole.model))
    assert (seconds["lost"], seconds["down"]) == pytest.approx((4, 30))
    assert seconds["starting"] == pytest.approx(10)
    # Of the save of the state itself, only what came before it knew the time is in it.
    assert sum(seconds.values()) == pytest.approx(clock.now - 1000 - (whole.goodput.seconds["saving"] - 2), abs=1)


def test_a_run_sends_heartbeats_between_saves(tmp_path):
    def wait(trainer: Any, **kwargs: Any) -> None:
        lock = tmp_path / ".lock"
        os.utime(lock, (1, 1))
        while lock.stat().st_mtime == 1:  # until the file is touched, as it is every five seconds
            time.sleep(0.05)

    states = SaveTrainingStateCallback(tmp_path, save_every_n_steps=3)
    adamw_trainer(float64_model(), callbacks=[states, listener(on_train_epoch_end=wait)]).train(float64_data(4), 1)
    assert (tmp_path / ".lock").stat().st_mtime > 1


def saved(clock: Clock, folder: Any, overhead: float = 0.02, seconds: float = 0.5, **kwargs: Any) -> Any:
    """The updates after which states were saved in a run of 600 updates of a second, and the run's trainer."""
    state = SlowState(clock, seconds)
    slow = listener(on_update_end=lambda trainer, **kwargs: clock.spend(1), **kwargs.pop("events", {}))
    states = SaveTrainingStateCallback(folder, save_every="auto", overhead=overhead)
    trainer = adamw_trainer(float64_model(), callbacks=[slow, state, states], seed=1)
    kwargs = {"num_epochs": 6, "per_device_batch_size": global_batch(2)} | kwargs
    trainer.train(float64_data(200), **kwargs)
    return sorted(int(path.name[7:]) for path in folder.glob("update-*")), trainer


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize(("overhead", "seconds"), some_of(product([0.01, 0.02, 0.1], [2.0, 0.5])))
def test_states_are_saved_as_often_as_the_budget_allows(clock, tmp_path, overhead, seconds):
    updates, trainer = saved(clock, tmp_path, overhead, seconds)
    assert trainer.goodput.fractions["saving"] == pytest.approx(overhead, abs=0.005)
    assert len(updates) > 2
    assert updates[-1] == 600


def test_saving_slows_down_when_states_become_slower(clock, tmp_path):
    def slow_down(trainer: Any, **kwargs: Any) -> None:
        if trainer.progress.epochs_completed == 3:
            next(each for each in trainer.callback_handler if isinstance(each, SlowState)).seconds = 2.0

    updates, trainer = saved(clock, tmp_path, events={"on_epoch_checkpoint": slow_down})
    assert trainer.goodput.fractions["saving"] == pytest.approx(0.02, abs=0.005)
    gaps = [after - before for before, after in pairwise(updates)]
    assert min(gaps[-3:-1]) > 2 * max(gaps[2:5])


@pytest.mark.thorough
def test_a_resumed_run_knows_the_cost_of_saving(clock, tmp_path):
    updates, whole = saved(clock, tmp_path / "whole")
    state = tmp_path / "whole" / f"update-{updates[5]:09d}"
    shutil.copytree(state, tmp_path / "killed" / state.name)
    resumed, trainer = saved(clock, tmp_path / "killed", resume_from="latest")
    assert resumed[1] - resumed[0] == pytest.approx(0.5 / 0.02, abs=2), "it knows how long a state takes"
    assert equal_weights(weights(trainer.model), weights(whole.model))


def on_ranks() -> Any:
    """The second process is three times as slow to save, and has a clock of its own."""
    clock = Clock()
    clock.spend(500 * rank())
    with shared_folder() as folder, clock.instead():
        updates, trainer = saved(clock, folder, seconds=0.5 + rank(), num_epochs=3)
    return world_size(), updates, weights(trainer.get_model()), trainer.goodput.fractions["saving"]


@pytest.mark.thorough
@pytest.mark.processes
def test_processes_save_together_at_the_pace_of_the_slowest(two_ranks):
    first, second = two_ranks(on_ranks)
    assert first[0] == second[0] == 2
    assert first[1] == second[1]
    assert len(first[1]) > 2
    assert equal_weights(first[2], second[2])
    assert second[3] <= 0.025
