"""Where the time goes is found: in data, passes, updates, evaluations and callbacks by name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import ProfilerCallback, StepBasedEvaluationCallback, TimingCallback
from tests.small import listener, make_trainer, train
from tests.tasks import Rows, regression_data, small_model

NAP = 0.03


class SlowRows(Rows):
    def __getitem__(self, index):
        time.sleep(NAP / 4)
        return super().__getitem__(index)


class Sleepy(TrainerCallback):
    def on_backward_end(self, trainer, **kwargs):
        time.sleep(NAP)


class SlowTrainer(Trainer):
    slow = ""

    def calculate_train_batch_loss(self, batch):
        time.sleep(NAP * (self.slow == "forward"))
        return super().calculate_train_batch_loss(batch)

    def backward_step(self, loss):
        time.sleep(NAP * (self.slow == "backward"))
        super().backward_step(loss)

    def optimizer_step(self):
        time.sleep(NAP * (self.slow == "optimizer"))
        super().optimizer_step()

    def calculate_eval_batch_loss(self, batch):
        time.sleep(NAP * (self.slow == "evaluation"))
        return super().calculate_eval_batch_loss(batch)


@pytest.mark.parametrize("slow", ["data", "forward", "backward", "optimizer", "evaluation", "Sleepy"])
def test_what_takes_the_time_is_found(slow, capsys):
    model, timing = small_model(), TimingCallback()
    trainer = SlowTrainer(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[*([Sleepy()] if slow == "Sleepy" else []), timing],
    )
    trainer.slow = slow
    data = regression_data(16)
    source = SlowRows(data) if slow == "data" else data
    trainer.train(source, 2, data, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0})
    least = 8 * NAP
    assert timing.totals[slow] >= least
    assert timing.totals["epochs"] >= least
    history = trainer.run_history
    if slow == "Sleepy":
        assert sum(history.get_metric_values("time_callbacks")) >= least
    else:
        assert sum(history.get_metric_values(f"time_{slow}")) == pytest.approx(timing.totals[slow])
    assert len(history.get_metric_values("time_epoch")) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Where the time went:"
    assert any(line.startswith(slow) for line in lines)
    assert lines[-1].startswith("all epochs")


def test_what_a_callback_makes_the_trainer_do_is_counted_once():
    model, timing = small_model(), TimingCallback(show=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SlowTrainer(model, nn.MSELoss(), optimizer, callbacks=[timing, StepBasedEvaluationCallback(1)])
    trainer.slow = "evaluation"
    data = regression_data(16)
    trainer.train(data, 1, data, per_device_batch_size=4)
    assert timing.totals["evaluation"] >= 5 * 4 * NAP
    parts = [seconds for name, seconds in timing.totals.items() if name not in ("epochs", "data_max")]
    assert sum(parts) < timing.totals["epochs"] + 4 * NAP  # counted twice, it would be 16 * NAP more


def test_the_handler_is_as_it_was_after_the_run_however_it_ends():
    def fail(trainer: Any, **kwargs: Any) -> None:
        raise ValueError("no")

    trainer = train(make_trainer([TimingCallback(show=False)]))
    assert trainer.callback_handler.timer is None
    failing = make_trainer([TimingCallback(show=False), listener(on_train_step_end=fail)])
    with pytest.raises(ValueError, match="no"):
        train(failing)
    assert failing.callback_handler.timer is None


def test_traces_are_written_for_the_steps_that_were_asked_for(tmp_path):
    profiler = ProfilerCallback(tmp_path / "profiles", wait=1, warmup=1, active=2, repeat=2)
    train(make_trainer([profiler]), epochs=4)
    traces = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    assert traces == ["trace-rank0-update4.json", "trace-rank0-update8.json"]
    events = json.loads((tmp_path / "profiles" / traces[0]).read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 2
    assert "aten::addmm" in names


@pytest.mark.parametrize("arguments", [{"active": 0}, {"wait": -1}, {"repeat": 0}])
def test_bad_arguments_are_named(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}="):
        ProfilerCallback(**arguments)
