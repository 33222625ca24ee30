"""diagnose(): it finds the bottleneck and changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import DEFAULT_CALLBACKS
from tests.launching import two_are_enough
from tests.ranks import rank, world_size
from tests.small_models import (
    Rows,
    Stream,
    adamw_trainer,
    equal_weights,
    fake_clock,
    float64_data,
    float64_model,
    make_trainer,
    weights,
)


class SlowOnTheLast(nn.Module):
    """Takes long on the last rank only, on the fake clock."""

    def __init__(self, pass_time: Callable[[float], None]) -> None:
        super().__init__()
        self.inner, self.pass_time = float64_model(), pass_time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pass_time(0.02 if rank() == world_size() - 1 else 1e-5)
        return self.inner(x)


class Speaks(TrainerCallback):
    """Communicates, which would hang if a process with a failing callback stopped doing so."""

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.barrier()


class Slow(nn.Module):
    """A model that takes some time."""

    def __init__(self, pass_time: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self.pass_time = float64_model(), pass_time

    def forward(self, x):
        self.pass_time()
        return self.inner(x)


class Logs(Trainer):
    """Uses what belongs to a batch in its step."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        self.log("samples", len(self.batch_indices))
        return output


def test_steps_may_log_values_and_ask_for_indices():
    trainer = make_trainer(model=float64_model(), trainer_class=Logs)
    assert trainer.diagnose(float64_data(16), per_device_batch_size=4, num_steps=2).samples == 4
    assert trainer.find_batch_size(float64_data(4)) == 4


def test_slow_data_are_found(pass_time):
    class SlowRows(Rows):
        def __getitem__(self, index):
            pass_time(0.004)
            return super().__getitem__(index)

    found = adamw_trainer(Slow(partial(pass_time, 0.008))).diagnose(
        SlowRows(float64_data(40)), num_steps=6, train_dataloader_kwargs={"num_workers": 0}
    )
    assert found.steps == 6
    assert found.samples == 8
    assert (found.data, found.forward, found.step) == pytest.approx((0.032, 0.008, 0.04))
    assert found.waiting == pytest.approx(0.8)
    assert "The model waits for data during 80 % of a step" in found.advice[0]
    assert f"num_workers={min(len(os.sched_getaffinity(0)), 8)}" in found.advice[0]
    assert "waiting for data" in repr(found)


def test_a_slow_model_is_not_reported_as_slow_data(pass_time):
    found = adamw_trainer(Slow(partial(pass_time, 0.01))).diagnose(float64_data(40), num_steps=6)
    assert (found.data, found.forward, found.waiting) == pytest.approx((0, 0.01, 0))
    assert not any("waits for data" in text for text in found.advice)


def test_an_update_that_takes_long_is_found(pass_time):
    class SlowUpdate(Trainer):
        def optimizer_step(self):
            pass_time(0.01)
            super().optimizer_step()

    model = Slow(partial(pass_time, 0.002))
    trainer = SlowUpdate(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()), callbacks=())
    found = trainer.diagnose(float64_data(40), num_steps=6)
    assert found.update == pytest.approx(0.01)
    assert any("AdamW(..., fused=True)" in text for text in found.advice)


class Sleeps(TrainerCallback):
    """Takes its time in each step, and remembers it."""

    def __init__(self, pass_time: Callable[[float], None]) -> None:
        self.pass_time, self.steps, self.count = pass_time, list[int](), 0

    def on_train_step_end(self, trainer, step, **kwargs):
        self.pass_time(0.03)
        self.steps.append(step)
        self.count += 1
        trainer.run_history.update_metric("slept", 0.03)

    def on_training_run_start(self, trainer, **kwargs):
        raise AssertionError("no run starts")


class SleepsLess(TrainerCallback):
    def __init__(self, pass_time: Callable[[float], None]) -> None:
        self.pass_time = pass_time

    def on_update_end(self, trainer, **kwargs):
        self.pass_time(0.002)

    def on_train_step_checkpoint(self, trainer, **kwargs):
        raise AssertionError("nothing is saved")


def test_the_time_of_callbacks_is_part_of_a_step(pass_time):
    sleeps = Sleeps(pass_time)
    callbacks = [*DEFAULT_CALLBACKS, SleepsLess(pass_time), sleeps]
    trainer = adamw_trainer(Slow(partial(pass_time, 0.018)), callbacks=callbacks)
    found = trainer.diagnose(float64_data(40), num_steps=6)
    assert found.callbacks == pytest.approx({"Sleeps": 0.03, "SleepsLess": 0.002})
    assert (found.step, found.unexplained) == pytest.approx((0.05, 0))
    assert "Callbacks take 64 % of a step, most of all Sleeps: 30 ms." in found.advice[0]
    assert re.search(r"own callbacks +32 ms\n", repr(found))
    assert (sleeps.steps, sleeps.count, len(trainer.run_history)) == ([], 0, 0)


def test_callbacks_that_need_a_run_are_reported_as_not_measured(pass_time):
    class NeedsRun(TrainerCallback):
        def on_training_run_start(self, trainer, **kwargs):
            self.writer = []

        def on_train_step_end(self, trainer, **kwargs):
            self.writer.append(1)

    class Stops(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            raise StopTrainingError

    callbacks = [Stops, NeedsRun, Sleeps(pass_time)]
    found = adamw_trainer(Slow(partial(pass_time, 0.01)), callbacks=callbacks).diagnose(float64_data(40), num_steps=6)
    assert found.callbacks == pytest.approx({"Stops": 0, "Sleeps": 0.03})
    error = "AttributeError: 'NeedsRun' object has no attribute 'writer'"
    assert found.advice[-1].startswith(f"Callbacks that could not be measured: NeedsRun ({error}). A run with Timing")


def test_unexplained_step_time_is_reported(pass_time):
    class Contended(Slow):
        """Slower if the data are read in between."""

        def forward(self, x):
            self.pass_time(0.02 if Reads.has_read else 0.01)
            Reads.has_read = False
            return self.inner(x)

    class Reads(Rows):
        has_read = False

        def __getitem__(self, index):
            Reads.has_read = True
            return super().__getitem__(index)

    arguments = {"num_steps": 6, "train_dataloader_kwargs": {"num_workers": 0}}
    found = adamw_trainer(Contended(pass_time)).diagnose(Reads(float64_data(48)), **arguments)
    assert (found.forward, found.step, found.unexplained) == pytest.approx((0.01, 0.02, 0.5), rel=0.2)
    assert re.search(r"\d\d % of a step are explained by none of its parts", " ".join(found.advice))


def diagnosis() -> Any:
    with fake_clock() as pass_time:
        model = SlowOnTheLast(pass_time)
        before = weights(model)
        found = adamw_trainer(model, callbacks=[Speaks]).diagnose(float64_data(48), num_steps=4)
    unchanged, said = equal_weights(weights(model), before), " ".join(found.advice)
    return {"unchanged": unchanged, "steps": found.steps, "step": found.step, "advice": said}


@pytest.mark.processes
@two_are_enough
def test_diagnosis_works_on_several_processes(ranks):
    for found in ranks(diagnosis):
        assert found["unchanged"]
        assert found["steps"] == 4
        assert found["step"] > 0
        assert "Callbacks that could not be measured: Speaks (several processes)." in found["advice"]


def test_diagnose_refuses_bad_limits_and_data_without_batches():
    trainer = adamw_trainer(float64_model())
    with pytest.raises(ValueError, match="num_steps=0 must be at least 1"):
        trainer.diagnose(float64_data(8), num_steps=0)
    with pytest.raises(ValueError, match="train_dataset is empty"):
        trainer.diagnose(float64_data(0))


@pytest.mark.extension("streams")
def test_a_stream_that_can_be_read_only_once_is_refused():
    class Once(IterableDataset):
        def __init__(self, size: int) -> None:
            self.samples = iter(float64_data(size))

        def __iter__(self) -> Iterator[object]:
            return self.samples

    trainer = adamw_trainer(float64_model())
    with pytest.raises(ValueError, match="train_dataset gave no batch"):
        trainer.diagnose(Stream(0))
    with pytest.raises(ValueError, match="exhausted after it was read once"):
        trainer.diagnose(Once(40), per_device_batch_size=4, num_steps=9)
    assert trainer.diagnose(Once(400), per_device_batch_size=4, num_steps=1).steps == 1
