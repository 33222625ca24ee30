"""TimingCallback finds where the time goes: data, passes, updates, evaluations and callbacks by name."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import ProfilerCallback, StepBasedEvaluationCallback, TimingCallback
from tests.ranks import rank
from tests.small_models import Rows, float64_data, float64_model, listener, make_trainer, train

NAP = 1 / 32  # of which sums are exact


class SlowRows(Rows):
    def __getitem__(self, index):
        time.sleep(NAP / 4)
        return super().__getitem__(index)


class Sleepy(TrainerCallback):
    def on_backward_end(self, trainer, **kwargs):
        time.sleep(NAP)


class Saver(TrainerCallback):
    def __init__(self, folder):
        self.folder = folder

    def on_epoch_checkpoint(self, trainer, **kwargs):
        trainer.save_checkpoint(self.folder / "weights.pt")


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


@pytest.mark.usefixtures("sleep_passes_time")
@pytest.mark.parametrize("slow", ["data", "forward", "backward", "optimizer", "evaluation", "saving", "Sleepy"])
def test_the_slow_part_is_found(slow, capsys, tmp_path):
    model, timing = float64_model(), TimingCallback()
    trainer = SlowTrainer(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[*{"Sleepy": [Sleepy()], "saving": [Saver(tmp_path)]}.get(slow, []), timing],
    )
    trainer.slow = slow
    if slow == "saving":
        model.register_state_dict_pre_hook(lambda *_: time.sleep(4 * NAP))
    data = float64_data(16)
    source = SlowRows(data) if slow == "data" else data
    trainer.train(source, 2, data, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0})
    least = 8 * NAP
    assert timing.totals[slow] >= least
    assert timing.totals["run"] >= least
    history = trainer.run_history
    if slow == "Sleepy":
        assert sum(history.get_metric_values("time_callbacks")) >= least
    elif slow == "saving":  # what is saved last comes after the last epoch
        assert history.get_metric_values("time_saving")[1] >= 4 * NAP
        assert timing.totals["Saver"] < 4 * NAP
    else:
        assert sum(history.get_metric_values(f"time_{slow}")) == pytest.approx(timing.totals[slow])
    assert len(history.get_metric_values("time_epoch")) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Where the time went:"
    assert any(line.startswith(slow) for line in lines)
    assert lines[-1].startswith("the whole run")


@pytest.mark.usefixtures("sleep_passes_time")
def test_an_evaluation_in_a_callback_is_counted_once():
    model, timing = float64_model(), TimingCallback(show=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SlowTrainer(model, nn.MSELoss(), optimizer, callbacks=[timing, StepBasedEvaluationCallback(1)])
    trainer.slow = "evaluation"
    data = float64_data(16)
    trainer.train(data, 1, data, per_device_batch_size=4)
    assert timing.totals["evaluation"] >= 5 * 4 * NAP
    parts = [seconds for name, seconds in timing.totals.items() if name not in ("run", "data_max")]
    assert sum(parts) < timing.totals["run"] + 4 * NAP  # counted twice, it would be 16 * NAP more


@pytest.mark.extension("model_ema")
@pytest.mark.usefixtures("sleep_passes_time")
def test_the_evaluation_of_an_average_counts_as_evaluation():
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    model, timing = float64_model(), TimingCallback(show=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = ModelEmaCallback(save_path=None, callbacks=[Sleepy()])
    trainer = SlowTrainer(model, nn.MSELoss(), optimizer, callbacks=[timing, average])
    trainer.slow = "evaluation"
    data = float64_data(16)
    trainer.train(data, 1, data, per_device_batch_size=4)
    assert timing.totals["evaluation"] == 8 * NAP
    assert timing.totals["ModelEmaCallback"] == 0


@pytest.mark.usefixtures("sleep_passes_time")
def test_times_of_callbacks_of_one_class_are_added_up():
    timing = TimingCallback(show=False)
    train(make_trainer([Sleepy(), timing, Sleepy()]))
    assert timing.totals["Sleepy"] >= 2 * 3 * NAP


class SleepyOnOne(TrainerCallback):
    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        time.sleep(0.05 if rank() else 0.0)


def times_of_callbacks() -> float:
    timing = TimingCallback(show=False)
    train(make_trainer([SleepyOnOne(), timing]))
    return timing.totals["SleepyOnOne"]


def test_times_of_callbacks_are_means_over_the_processes(two_ranks):
    first, second = two_ranks.run(times_of_callbacks)
    assert first == second > 0


def test_a_run_that_is_interrupted_has_its_table_too(capsys):
    def interrupt(trainer: Any) -> None:
        if trainer.progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make_trainer([TimingCallback(), listener(on_train_epoch_start=interrupt)]), epochs=2)
    assert "Where the time went:" in capsys.readouterr().out


def test_the_handler_is_restored_however_the_run_ends():
    def fail(trainer: Any, **kwargs: Any) -> None:
        raise ValueError("enough of this")

    trainer = train(make_trainer([TimingCallback(show=False)]))
    assert trainer.callback_handler.timer is None
    failing = make_trainer([TimingCallback(show=False), listener(on_train_step_end=fail)])
    with pytest.raises(ValueError, match=r"^enough of this"):
        train(failing)
    assert failing.callback_handler.timer is None


def test_a_second_timing_callback_is_refused():
    trainer = make_trainer([TimingCallback(), TimingCallback()])
    with pytest.raises(ValueError, match="callbacks holds more than one TimingCallback"):
        train(trainer)
    assert trainer.progress.update == 0


@pytest.mark.filterwarnings("ignore:.*Profiler")
def test_traces_are_written_for_the_requested_steps(tmp_path):
    profiler = ProfilerCallback(tmp_path / "profiles", wait=1, warmup=1, active=2, repeat=2)
    train(make_trainer([profiler]), epochs=4)
    traces = sorted((tmp_path / "profiles").glob("rank0.*.pt.trace.json"))
    assert len(traces) == 2
    events = json.loads(traces[0].read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 2
    assert "aten::addmm" in names


@pytest.mark.filterwarnings("ignore:.*Profiler")
def test_a_run_too_short_for_a_trace_warns(tmp_path, capsys):
    train(make_trainer([ProfilerCallback(tmp_path)]))
    assert "no trace: the run had 3 steps, and the first 7 are not recorded" in capsys.readouterr().out
    train(make_trainer([ProfilerCallback(tmp_path, wait=1, warmup=1)]))
    assert "no trace" not in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.filterwarnings("ignore:.*Profiler")
@pytest.mark.parametrize(("wait", "active", "traces"), [(2, 3, 0), (0, 1, 1)])
def test_a_trace_without_steps_is_not_written(wait, active, traces, tmp_path, capsys):
    train(make_trainer([ProfilerCallback(tmp_path, wait=wait, warmup=1, active=active, repeat=2)]))
    assert ("has written no trace" in capsys.readouterr().out) == (traces == 0)
    assert len(list(tmp_path.iterdir())) == traces


@pytest.mark.filterwarnings("ignore:.*Profiler")
def test_traces_within_one_update_have_names_of_their_own(tmp_path):
    profiler = ProfilerCallback(tmp_path, wait=0, warmup=0, active=1, repeat=4)
    train(make_trainer([profiler]), size=8, gradient_accumulation_steps=4)
    assert len(list(tmp_path.iterdir())) == 4


def test_the_warning_of_a_profile_without_warmup_comes_once(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(make_trainer([ProfilerCallback(tmp_path, wait=1, warmup=0, active=1, repeat=1)]), size=8)
    assert len([warning for warning in caught if "warmup" in str(warning.message)]) <= 1


@pytest.mark.parametrize("arguments", [{"active": 0}, {"wait": -1}, {"repeat": 0}])
def test_the_profiler_refuses_bad_counts(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]} must be at least"):
        ProfilerCallback(**arguments)
