"""Shipped callbacks: a contract for all of them, and the behaviour of each."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import (
    NonFiniteLossError,
    StopTrainingError,
    Trainer,
    TrainerCallback,
    callbacks,
    get_default_callbacks,
)
from pytorch_accel_lite.callbacks import (
    DEFAULT_CALLBACKS,
    AdviceCallback,
    EarlyStoppingCallback,
    LogMetricsCallback,
    ModelEmaCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    ProgressTableCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    TerminateOnNaNCallback,
    TimeLimitCallback,
)
from tests.launching import some_of, two_are_enough
from tests.ranks import rank, shared_folder
from tests.shared_trainings import StopsAt
from tests.shipped_callbacks import EVENTFUL, NEEDS_A_SCALER, NOT_REPEATABLE, RUN, SHIPPED, STATEFUL, STATELESS, build
from tests.small_models import (
    Stream,
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_model,
    make_trainer,
    raises_at,
    same_bits,
    train,
    weights,
)

# The scores of these scripts are as good as one says.
pytestmark = pytest.mark.filterwarnings("ignore:.*whether greater values are better is unknown")


class Scripted(Trainer):
    """Records what ``script`` says as ``score`` at the end of each evaluation."""

    script: ClassVar[list[float]] = []

    def eval_epoch_end(self):
        self.run_history.update_metric("score", self.script[self.run_history.current_epoch - 1])


def scripted(script: list[float], *callbacks: Any, epochs: int | None = None, **kwargs: Any) -> Any:
    """Train for as many epochs as there are scores, and return the trainer with the weights after each epoch."""
    kept = []
    trainer_class = type("Scripted", (Scripted,), {"script": script})
    keep = listener(on_training_run_epoch_end=lambda t: kept.append(weights(t.model)))
    trainer = make_trainer([keep, *callbacks], trainer_class=trainer_class)
    train(trainer, epochs=epochs or len(script), eval_dataset=True, **kwargs)
    trainer.weights_after_epoch = kept
    return trainer


# -------------------------------------------------------------------------------------- the contract


def test_the_callbacks_that_the_contract_is_about_are_found():
    assert len(SHIPPED) >= 7
    assert set(DEFAULT_CALLBACKS) <= set(SHIPPED)


@pytest.mark.slow
@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_serves_two_runs(callback_class, here):
    data = make_data(6)
    callback, needs = build(callback_class), RUN.get(callback_class.__name__, {})
    trainer = make_trainer([callback])
    start = weights(trainer.model)
    train(trainer, epochs=2, train_dataset=data, eval_dataset=data, **needs)
    assert trainer.progress.update == 6 or "Limit" in callback_class.__name__
    assert not equal_weights(weights(trainer.model), start)
    train(trainer, epochs=2, train_dataset=data, eval_dataset=data, **needs)
    assert trainer.progress.epochs_completed == 2 or "has not improved" in trainer.stop_reason
    assert math.isfinite(trainer.evaluate(data)["evaluation_loss"])
    assert trainer.predict(data).shape == (6, 1)
    assert trainer.callback_handler.callbacks == [callback]


@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_serves_inference_before_any_run(callback_class, here):
    trainer = make_trainer([build(callback_class)])
    trainer.evaluate(make_data())
    assert trainer.predict(make_data()).shape == (6, 1)


@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_serves_a_run_without_length(callback_class, here):
    trainer = make_trainer([build(callback_class)])
    data = {"train_dataset": Stream(6), "eval_dataset": Stream(3), "train_dataloader_kwargs": {}}
    train(trainer, epochs=2, **data, **RUN.get(callback_class.__name__, {}))
    assert trainer.progress.epochs_completed == 2 or "has not improved" in trainer.stop_reason


@pytest.mark.slow
@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_survives_a_run_that_fails_or_stops(callback_class, here):
    arguments = {"eval_dataset": True, **RUN.get(callback_class.__name__, {})}
    pending: list[BaseException] = [KeyboardInterrupt(), StopTrainingError("enough"), ValueError("broken")]

    def fail(trainer: Trainer, **kwargs: Any) -> None:
        if pending:
            raise pending.pop()

    for event in ("on_training_run_start", "on_train_step_end", "on_eval_step_end"):
        errors = list(pending)
        trainer = make_trainer([listener(**{event: fail}), build(callback_class)])
        for error in reversed(errors):
            if isinstance(error, StopTrainingError):
                train(trainer, **arguments)
                assert trainer.stop_reason == "enough"
            else:
                with pytest.raises(type(error)):
                    train(trainer, **arguments)
        train(trainer, **arguments)
        assert trainer.progress.epochs_completed == 1
        pending.extend(errors)


@pytest.mark.parametrize(
    "callback_class", [c for c in SHIPPED if hasattr(c, "state_dict") and c.__name__ not in STATELESS | NEEDS_A_SCALER]
)
def test_states_of_shipped_callbacks_survive_a_round_trip(callback_class, here):
    callback = callback_class(**STATEFUL.get(callback_class.__name__, {}))
    before = callback.state_dict()
    train(make_trainer([callback]), epochs=2, eval_dataset=make_data(), **EVENTFUL.get(callback_class.__name__, {}))
    state = callback.state_dict()
    assert not same_bits(state, before), "the run has left no trace in the state: the test tells nothing"
    torch.save(state, here / "state.pt")
    restored = callback_class(**STATEFUL.get(callback_class.__name__, {}))
    restored.load_state_dict(torch.load(here / "state.pt", weights_only=True))
    assert same_bits(restored.state_dict(), state)


@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_shipped_callback_has_both_halves_of_a_state_or_none(callback_class):
    assert hasattr(callback_class, "state_dict") == hasattr(callback_class, "load_state_dict")


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("callback_class", [c for c in SHIPPED if not re.search("Limit|Unfreezing", c.__name__)])
def test_a_shipped_callback_changes_no_bit_of_the_training(callback_class, seed, here):
    if seed is None and callback_class is SaveTrainingStateCallback:
        pytest.skip("the order of the data follows from a seed then, as documented")
    seen: list[Any] = []
    keep = listener(on_train_step_end=lambda t, **_: seen.append(weights(t.model)))
    arguments = {"train_dataloader_kwargs": {"shuffle": True}, **RUN.get(callback_class.__name__, {})}
    torch.manual_seed(0)
    train(make_trainer([keep, build(callback_class)], seed=seed), eval_dataset=True, **arguments)
    with_callback, seen[:] = list(seen), []
    torch.manual_seed(0)
    train(make_trainer([keep], seed=seed), eval_dataset=True, **arguments)
    assert len(seen) == 3
    assert all(map(equal_weights, with_callback, seen))


@pytest.mark.slow
@pytest.mark.parametrize("callback_class", SHIPPED)
def test_a_run_with_a_shipped_callback_resumes_from_its_middle(callback_class, here):
    def run(folder: str, **kwargs: Any) -> tuple[Trainer, TrainerCallback]:
        callback = build(callback_class)
        trainer = make_trainer([callback, SaveTrainingStateCallback(here / folder, save_every_n_steps=1)], seed=1)
        arguments = {"train_dataloader_kwargs": {"shuffle": True}, **RUN.get(callback_class.__name__, {}), **kwargs}
        return train(trainer, epochs=2, eval_dataset=make_data(), **arguments), callback

    whole, callback = run("whole")
    middle = max(here.glob("whole/update-*")).parent / "update-000000002"
    resumed, again = run("resumed", resume_from=middle)
    assert equal_weights(weights(resumed.model), weights(whole.model))
    if callback_class.__name__ not in NOT_REPEATABLE:
        assert resumed.run_history.to_dict() == whole.run_history.to_dict()
    assert resumed.progress == whole.progress
    if hasattr(callback, "state_dict") and callback_class is not SaveTrainingStateCallback:
        assert same_bits(again.state_dict(), callback.state_dict())


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("callback_class", some_of(SHIPPED))
def test_a_stopped_run_with_a_shipped_callback_trains_further(callback_class, here, monkeypatch):
    def run(event: str, stops_at: int) -> Trainer:
        (here / event).mkdir(exist_ok=True)
        monkeypatch.chdir(here / event)
        callbacks = [build(callback_class), SaveTrainingStateCallback("states"), StopsAt(event, stops_at)]
        arguments = RUN.get(callback_class.__name__, {})
        return train(make_trainer(callbacks, seed=1), 3, eval_dataset=make_data(), resume_from="latest", **arguments)

    whole = run("on_training_run_end", 100)
    for event in ("on_train_epoch_end", "on_training_run_epoch_end"):
        assert run(event, 6).stop_reason == "enough"
        further = run(event, 100)
        assert equal_weights(weights(further.model), weights(whole.model))
        if callback_class.__name__ not in NOT_REPEATABLE:
            assert further.run_history.to_dict() == whole.run_history.to_dict()
        assert further.progress == whole.progress


@pytest.mark.slow
def test_all_shipped_callbacks_can_be_combined(here):
    trainer = make_trainer([build(c) for c in SHIPPED])
    needs = {name: value for arguments in RUN.values() for name, value in arguments.items()}
    train(trainer, epochs=2, eval_dataset=True, **needs)
    trainer.evaluate()
    assert trainer.progress.epochs_completed >= 1


# -------------------------------------------------------------------------------------- the defaults


def test_the_default_callbacks_show_a_table_not_printed_lines():
    assert get_default_callbacks() == DEFAULT_CALLBACKS
    assert (
        MoveModulesToDeviceCallback,
        TerminateOnNaNCallback,
        ProgressTableCallback,
        ProgressBarCallback,
        AdviceCallback,
    ) == DEFAULT_CALLBACKS
    without = get_default_callbacks(progress_bar=False)
    assert list(without) == [c for c in DEFAULT_CALLBACKS if c is not ProgressBarCallback]


def test_two_trainers_share_none_of_their_default_callbacks():
    model = make_model()
    first, second = (Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2))
    assert [type(c) for c in first.callback_handler] == list(DEFAULT_CALLBACKS)
    assert not set(first.callback_handler) & set(second.callback_handler)


def test_the_default_output_of_a_run_names_epochs_and_metrics(capsys):
    train(make_trainer(DEFAULT_CALLBACKS), epochs=2, eval_dataset=True)
    lines = capsys.readouterr().out.splitlines()
    shape = [re.sub(r"[-\d.e][-\d.,e]*(?=s?,|$)", "#", line.strip()) for line in lines]
    epoch = ["train_loss_epoch: #", "eval_loss_epoch: #", "time: #s, samples/s: #, lr: #"]
    assert lines[0] == "Starting training run"
    assert lines[1] == "Starting epoch 1/2"
    assert shape[2:5] == epoch
    assert lines[5] == "Starting epoch 2/2"
    assert shape[6:9] == epoch
    assert [line.split()[0] for line in lines[9:]] == ["Trained", "Best:"]


def test_epochs_are_announced_without_an_unknown_total(capsys):
    train(
        make_trainer([PrintProgressCallback]),
        epochs=None,
        max_num_train_steps=4,
        train_dataset=Stream(6),
        train_dataloader_kwargs={},
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["Starting training run", "Starting epoch 1", "Starting epoch 2", "Finishing training run"]


# --------------------------------------------------------------------------------------- progress bar


def last_bar(err: str, word: str) -> str:
    """The last state of a bar, as it was written to the terminal."""
    return [part for part in re.split(r"[\r\n]", err) if word in part][-1]


def test_the_progress_bar_is_silent_without_a_terminal(capfd):
    assert not sys.stderr.isatty()
    train(make_trainer([ProgressBarCallback()]), epochs=2, eval_dataset=True).predict(make_data())
    captured = capfd.readouterr()
    assert captured.err == captured.out == ""


def test_the_progress_bar_shows_loss_learning_rate_and_speed(capfd):
    trainer = make_trainer([ProgressBarCallback(show_always=True, refresh_seconds=0)])
    train(trainer, epochs=2, size=6, eval_dataset=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    bar = last_bar(captured.err, "Epoch 2/2")
    assert "3/3" in bar
    loss = float(re.search(r"loss=([\d.e+-]+)", bar)[1])
    assert loss == pytest.approx(trainer.run_history.get_latest_metric("train_loss_epoch"), rel=1e-3)
    assert float(re.search(r"lr=([\d.e+-]+)", bar)[1]) == 0.1
    assert re.search(r"samples/s=[\d,]+", bar)
    assert "Evaluating" in captured.err


def test_the_progress_bar_shows_the_last_evaluation_and_eta(capfd):
    trainer = make_trainer([ProgressBarCallback(show_always=True, refresh_seconds=0)])
    train(trainer, epochs=3, eval_dataset=True)
    err = capfd.readouterr().err
    first, *_, last = re.findall(r"Epoch \d/3[^\r\n]*run ETA=[^\r\n]*", err)
    assert "eval_loss" not in first
    evaluated = trainer.run_history.get_metric_values("eval_loss_epoch")
    assert float(re.search(r"eval_loss=([\d.e+-]+)", last)[1]) == pytest.approx(evaluated[1], rel=1e-3)
    assert re.search(r"run ETA=00:00", last)
    assert re.search(r"Evaluating: +\d+%[^\r\n]*ETA=00:00", err)


def test_without_a_terminal_lines_of_progress_are_printed(capsys):
    trainer = make_trainer([ProgressBarCallback(line_every_seconds=1e-9)])
    train(trainer, epochs=2, eval_dataset=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert re.fullmatch(
        r"Epoch 2/2, step 3/3: loss [\d.e+-]+, run ETA 00:00, samples/s [\d,]+, eval_loss [\d.e+-]+, lr 0\.1", lines[8]
    )
    assert lines[9:] == [f"Evaluating, step {step}/3: ETA 00:00" for step in (1, 2, 3)]
    train(make_trainer([ProgressBarCallback(line_every_seconds=None)]))
    assert capsys.readouterr().out == ""


def test_samples_a_second_are_of_the_last_training_steps(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def spend(trainer: Trainer, **kwargs: Any) -> None:
        nonlocal now
        now += {1: 50.0, 20: 0.5}.get(trainer.progress.update, 0.1)  # seconds, of steps of two samples

    spending = listener(on_train_step_end=spend, on_eval_step_end=spend)
    bar = ProgressBarCallback(line_every_seconds=1e-9)
    train(make_trainer([spending, bar]), epochs=2, size=60, eval_dataset=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch")]
    assert "samples/s" not in lines[0]  # takes 50 seconds
    rates = [float(re.search(r"samples/s ([\d.]+)", line)[1]) for line in lines[1:]]
    assert rates[:18] == [20.0] * 18
    assert 15 <= rates[18] < 18  # the step itself made 4
    assert rates[18:] == sorted(rates[18:])
    assert rates[-1] > rates[18]


def test_the_progress_bar_shows_the_schedules_learning_rate(capfd):
    train(
        make_trainer([ProgressBarCallback(show_always=True, refresh_seconds=0)]),
        size=6,
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    bars = [float(lr) for lr in re.findall(r"lr=([\d.e+-]+)", capfd.readouterr().err)]
    assert bars[-1] == 0.025  # of the last update: the schedule is at 0.0125
    assert 0.05 in bars


def test_the_progress_bar_works_for_data_without_length(capfd):
    trainer = make_trainer([ProgressBarCallback(show_always=True, refresh_seconds=0)])
    train(trainer, epochs=2, train_dataset=Stream(6), eval_dataset=Stream(4), train_dataloader_kwargs={})
    trainer.predict(Stream(4))
    err = capfd.readouterr().err
    assert re.search(r"Epoch 2/2: 3 batches", last_bar(err, "Epoch 2/2"))
    assert "Evaluating" in err
    assert "Predicting" in err


@pytest.mark.parametrize("error", [ValueError("broken"), StopTrainingError("enough"), KeyboardInterrupt()])
@pytest.mark.parametrize("event", ["on_train_step_end", "on_eval_step_end"])
def test_no_bar_stays_open_when_a_run_ends_early(event, error, capfd):
    from tqdm.auto import tqdm

    def fail(trainer: Trainer, **kwargs: Any) -> None:
        raise error

    trainer = make_trainer([ProgressBarCallback(show_always=True), listener(**{event: fail})])
    try:
        train(trainer, eval_dataset=True)
    except type(error):
        pass
    assert not [bar for bar in getattr(tqdm, "_instances", ()) if not bar.disable]


def test_custom_numbers_can_be_put_after_the_bar(capfd):
    def show(trainer: Trainer, step: int, **kwargs: Any) -> None:
        bars.pbar.set_postfix({"mine": f"{step + 1} of {bars.pbar.total}"})

    bars = ProgressBarCallback(show_always=True, refresh_seconds=0)
    train(make_trainer([bars, listener(on_train_step_end=show)]), epochs=1)
    assert "mine=2 of 3" in capfd.readouterr().err


@pytest.mark.parametrize("value", [-1, math.nan])
def test_a_progress_bar_with_a_negative_refresh_is_refused(value):
    with pytest.raises(ValueError, match=f"refresh_seconds={value} must be at least 0"):
        ProgressBarCallback(refresh_seconds=value)


# ---------------------------------------------------------------------------------------- log metrics


class Collecting(LogMetricsCallback):
    """Collects the values that it has to log."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    def log_metrics(self, trainer, metrics):
        self.logged.append(dict(metrics))


def test_each_metric_of_a_run_is_printed_once(capsys):
    trainer = make_trainer([LogMetricsCallback])
    train(trainer, epochs=3, eval_dataset=True)
    out = capsys.readouterr().out
    assert out.count("train_loss_epoch:") == out.count("eval_loss_epoch:") == 3
    for values in trainer.run_history.to_dict().values():
        for value in values:
            assert out.count(f"{value:.6g}") >= 1


def test_logged_metrics_equal_the_history(capsys):
    collecting = Collecting()
    trainer = train(make_trainer([collecting]), epochs=2, eval_dataset=True)
    assert capsys.readouterr().out == ""
    rebuilt: dict[str, list[float]] = {}
    for metrics in collecting.logged:
        for name, value in metrics.items():
            rebuilt.setdefault(name, []).append(value)
    assert rebuilt == trainer.run_history.to_dict()


@pytest.mark.parametrize("event", ["on_eval_epoch_end", "on_training_run_epoch_end"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_metrics_recorded_at_an_ending_event_are_logged_once(event, order):
    collecting = Collecting()
    recording = listener(**{event: lambda t, **_: t.run_history.update_metric("mine", t.progress.epoch)})
    callbacks = [recording, collecting] if order == "before" else [collecting, recording]
    train(make_trainer(callbacks), epochs=2, eval_dataset=True)
    assert [metrics["mine"] for metrics in collecting.logged if "mine" in metrics] == [1, 2]


def test_metrics_of_an_evaluation_are_logged_once():
    collecting = Collecting()
    trainer = train(make_trainer([collecting]), epochs=2, eval_dataset=True)
    collecting.logged.clear()
    metrics = trainer.evaluate()
    assert collecting.logged == [metrics]


def test_a_second_run_logs_only_its_own_metrics():
    for reset in (True, False):
        collecting = Collecting()
        trainer = train(make_trainer([collecting]), epochs=2)
        collecting.logged.clear()
        train(trainer, epochs=2, reset_run_history=reset)
        values = trainer.run_history.get_metric_values("train_loss_epoch")[-2:]
        assert collecting.logged == [{"train_loss_epoch": value} for value in values]


def test_metrics_of_a_stopped_epoch_are_logged():
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError("enough")

    collecting = Collecting()
    trainer = train(make_trainer([listener(on_eval_epoch_end=stop), collecting]), eval_dataset=True)
    names = [name for metrics in collecting.logged for name in metrics]
    assert sorted(names) == ["eval_loss_epoch", "train_loss_epoch"] == sorted(trainer.run_history.get_metric_names())


# ------------------------------------------------------------------------------------ terminate on NaN


def poisoned(value: float, sample: int = 7, size: int = 8) -> TensorDataset:
    """Data of which one target is not finite."""
    data = make_data(size)
    data.tensors[1][sample] = value
    return data


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_an_error_with_its_position(value):
    fired: list[str] = []
    callback = TerminateOnNaNCallback()
    watch = listener(
        on_exception=lambda t, exception: fired.append(f"on_exception {type(exception).__name__}"),
        on_training_run_end=lambda t: fired.append("on_training_run_end"),
        on_train_step_end=lambda t, step, **_: fired.append(f"step {step}"),
        on_eval_epoch_start=lambda t, **_: fired.append("evaluation"),
    )
    trainer = make_trainer([callback, watch])
    with pytest.raises(NonFiniteLossError) as caught:
        train(trainer, epochs=3, train_dataset=poisoned(value, sample=5), eval_dataset=make_data())
    assert isinstance(caught.value, FloatingPointError)
    assert not isinstance(caught.value, SystemExit)
    message = str(caught.value)
    assert "epoch 1" in message
    assert "step 2" in message
    assert "loss=nan" in message if math.isnan(value) else "loss=inf" in message
    assert fired == ["step 0", "step 1", "step 2", "on_exception NonFiniteLossError", "on_training_run_end"]
    assert callback.triggered


@pytest.mark.filterwarnings("error")
def test_the_error_of_a_loss_that_is_not_finite_names_the_losses():
    class TwoLosses(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return output | {"loss": {"fit": output["loss"], "penalty": output["loss"] * math.inf}}

    with pytest.raises(NonFiniteLossError, match=r"fit=\d.*penalty=inf"):
        train(make_trainer([TerminateOnNaNCallback], trainer_class=TwoLosses))


def test_the_error_names_the_epoch_in_which_the_loss_became_nan():
    class LaterNaN(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            late = self.progress.epoch == 2 and self.progress.step == 1
            return output | {"loss": output["loss"] * (math.nan if late else 1)}

    with pytest.raises(NonFiniteLossError, match=r"epoch 2, step 1"):
        train(make_trainer([TerminateOnNaNCallback], trainer_class=LaterNaN), epochs=3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nan_is_seen_in_every_precision(dtype):
    model = make_model().to(dtype)
    data = TensorDataset(*(tensor.to(dtype) for tensor in poisoned(math.nan, 0).tensors))
    with pytest.raises(NonFiniteLossError):
        train(make_trainer([TerminateOnNaNCallback], model=model), train_dataset=data)


def test_a_nan_in_the_evaluation_of_a_run_ends_it_too():
    with pytest.raises(NonFiniteLossError, match=r"evaluation loss.*eval_loss_epoch=nan"):
        train(make_trainer([TerminateOnNaNCallback]), eval_dataset=poisoned(math.nan))


class LogsNaN(Trainer):
    """Returns losses by name, and logs a number that is not finite."""

    def calculate_train_batch_loss(self, batch):
        loss = super().calculate_train_batch_loss(batch)["loss"]
        self.log("auc", math.nan)
        return {"loss": {"fit": loss, "penalty": 0.1 * loss}}

    def calculate_eval_batch_loss(self, batch):
        loss = super().calculate_eval_batch_loss(batch)["loss"]
        self.log("auc", math.nan)
        return {"loss": {"fit": loss, "penalty": 0.1 * loss}}


def test_a_custom_number_may_be_nan():
    callbacks = [TerminateOnNaNCallback, StepBasedEvaluationCallback(2)]
    trainer = train(make_trainer(callbacks, trainer_class=LogsNaN), epochs=2, eval_dataset=True)
    for name in ("train_auc_epoch", "eval_auc_epoch", "intermediate_eval_auc"):
        assert all(map(math.isnan, trainer.run_history[name]))
    match = r"evaluation loss.*: eval_loss_epoch=nan, eval_fit_epoch=nan, eval_penalty_epoch=nan\."
    with pytest.raises(NonFiniteLossError, match=match):
        train(make_trainer(callbacks[:1], trainer_class=LogsNaN), eval_dataset=poisoned(math.nan))


def test_evaluate_returns_a_nan_loss():
    assert math.isnan(make_trainer([TerminateOnNaNCallback]).evaluate(poisoned(math.nan))["evaluation_loss"])


def test_without_the_callback_a_nan_ends_nothing():
    with pytest.warns(UserWarning, match="with weights that are infinite or NaN"):
        trainer = train(make_trainer(), epochs=2, train_dataset=poisoned(math.nan))
    assert trainer.progress.epochs_completed == 2


def test_after_a_nan_the_next_run_starts_fresh():
    callback = TerminateOnNaNCallback()
    trainer = make_trainer([callback])
    with pytest.raises(NonFiniteLossError):
        train(trainer, train_dataset=poisoned(math.nan))
    trainer.model.load_state_dict(make_model().state_dict())
    train(trainer)
    assert not callback.triggered


# ----------------------------------------------------------------------------------------- best model


@pytest.mark.parametrize(
    ("script", "greater", "best"),
    [([3, 1, 2], False, 2), ([1, 3, 2], True, 2), ([2, 2, 2], False, 1), ([5, 4, 3], False, 3), ([5, 4, 3], True, 1)],
)
def test_the_best_model_is_saved_and_loaded_at_the_end(script, greater, best, tmp_path):
    callback = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="score", greater_is_better=greater)
    trainer = scripted(script, callback)
    assert callback.best_metric == script[best - 1]
    assert callback.best_metric_epoch == best
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[best - 1])
    saved = torch.load(tmp_path / "best.pt", weights_only=True)
    assert equal_weights(saved["model_state_dict"], trainer.weights_after_epoch[best - 1])
    assert saved["score"] == script[best - 1]
    assert saved["epoch"] == best


def test_the_last_model_stays_if_the_best_is_not_to_be_loaded(tmp_path):
    callback = SaveBestModelCallback(tmp_path / "best.pt", "score", load_saved_checkpoint=False)
    trainer = scripted([1, 2, 3], callback)
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[2])
    assert equal_weights(torch.load(tmp_path / "best.pt")["model_state_dict"], trainer.weights_after_epoch[0])


def test_the_optimizers_state_is_that_of_the_best_epoch_too(tmp_path):
    model = make_model()
    trainer = make_trainer(
        [SaveBestModelCallback(tmp_path / "best.pt", "score")],
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        trainer_class=type("Scripted", (Scripted,), {"script": [1, 2, 3]}),
    )
    train(trainer, epochs=3, size=6, eval_dataset=True)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {3}


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("scheduler", [True, False])
@pytest.mark.parametrize("script", [[1.0], [3.0, 2.0, 1.0]])
def test_a_best_model_may_omit_optimizer_and_scheduler(script, optimizer, scheduler, tmp_path):
    callback = SaveBestModelCallback(
        tmp_path / "best.pt", "score", save_optimizer=optimizer, save_scheduler=scheduler, load_saved_checkpoint=False
    )
    scripted(script, callback, create_scheduler_fn=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1))
    saved = torch.load(tmp_path / "best.pt", weights_only=True)
    assert ("optimizer_state_dict" in saved) == optimizer
    assert ("scheduler_state_dict" in saved) == scheduler


@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize(("script", "best"), [([math.nan, 2.0, math.nan], 2), ([2.0, math.nan, math.nan], 1)])
def test_nan_is_never_the_best(script, best, greater, tmp_path):
    trainer = scripted(script, SaveBestModelCallback(tmp_path / "best.pt", "score", greater_is_better=greater))
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[best - 1])


def test_nothing_is_saved_when_all_scores_are_nan(tmp_path, capsys):
    trainer = scripted([math.nan, math.nan], SaveBestModelCallback(tmp_path / "best.pt", "score"))
    assert "No best model was saved: score never had a numeric value." in capsys.readouterr().out
    assert not (tmp_path / "best.pt").exists()
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[1])


@pytest.mark.parametrize(("error", "is_loaded"), [(ValueError, False), (KeyboardInterrupt, True)])
def test_the_best_model_is_loaded_unless_an_error_ends_the_run(error, is_loaded, tmp_path, capsys):
    class Ends(Scripted):
        script = (1.0, 2.0, 3.0)

        def train_epoch_start(self):
            super().train_epoch_start()
            if self.run_history.current_epoch == 3:
                raise error("no more")

    ends = []
    keep = listener(on_training_run_epoch_end=lambda t: ends.append(weights(t.model)))
    trainer = make_trainer([keep, SaveBestModelCallback(tmp_path / "best.pt", "score")], trainer_class=Ends)
    with pytest.raises(error):
        train(trainer, epochs=3, eval_dataset=True)
    said = capsys.readouterr().out
    assert ("Loading the best model: epoch 1" in said) == is_loaded
    assert ("The run failed, so the best model is not loaded. It is in" in said) != is_loaded
    assert equal_weights(weights(trainer.model), ends[0 if is_loaded else 1])
    trainer.load_checkpoint(tmp_path / "best.pt")
    assert equal_weights(weights(trainer.model), ends[0])


def test_an_infinite_loss_is_worse_than_a_finite_one_after_it(tmp_path):
    trainer = scripted([math.inf, 5.0], SaveBestModelCallback(tmp_path / "best.pt", "score"))
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[1])


@pytest.mark.parametrize(
    ("make", "other", "argument"),
    [
        (SaveBestModelCallback, SaveBestModelCallback, "save_path"),
        (lambda path: ModelEmaCallback(save_path=path), SaveBestModelCallback, "save_path"),
        (lambda path: ModelEmaCallback(save_path=path), lambda path: ModelEmaCallback(save_path=path), "save_path"),
        (SaveTrainingStateCallback, SaveTrainingStateCallback, "save_dir"),
        pytest.param(
            lambda path: callbacks.MetricsFileCallback(path),
            lambda path: callbacks.MetricsFileCallback(path),
            "path",
            marks=pytest.mark.extension("metrics_file"),
        ),
    ],
)
def test_two_callbacks_that_would_write_to_one_path_are_refused(make, other, argument, here):
    steps: list[int] = []
    callbacks = [
        make("same.jsonl"),
        other(here / "same.jsonl"),
        listener(on_train_step_start=lambda t: steps.append(1)),
    ]
    with pytest.raises(ValueError, match=rf"{argument}=.*same.jsonl' is used by two callbacks, \w+ and \w+, which"):
        train(make_trainer(callbacks), eval_dataset=True)
    assert not steps


def test_two_best_models_by_different_metrics_are_kept(tmp_path):
    low = SaveBestModelCallback(tmp_path / "low.pt", "score", load_saved_checkpoint=False)
    high = SaveBestModelCallback(tmp_path / "high.pt", "score", greater_is_better=True)
    trainer = scripted([3, 1, 2], low, high)
    after = trainer.weights_after_epoch
    assert equal_weights(torch.load(tmp_path / "low.pt")["model_state_dict"], after[1])
    assert equal_weights(torch.load(tmp_path / "high.pt")["model_state_dict"], after[0])
    assert equal_weights(weights(trainer.model), after[0])


def test_a_metric_that_an_earlier_callback_records_is_watched(tmp_path):
    record = listener(on_eval_epoch_end=lambda t, **_: t.run_history.update_metric("mine", -t.progress.epoch))
    best = SaveBestModelCallback(tmp_path / "best.pt", "mine")
    train(make_trainer([record, best]), epochs=3, eval_dataset=True)
    assert best.best_metric_epoch == 3


@pytest.mark.parametrize(("last", "is_saved"), [(5.0, False), (1.0, True)])
def test_a_missing_best_model_of_a_resumed_run_is_warned_of(last, is_saved, tmp_path, capsys):
    def run(epochs: int, **kwargs: Any) -> Any:
        callbacks = SaveTrainingStateCallback(tmp_path / "states"), SaveBestModelCallback(tmp_path / "best.pt", "score")
        return scripted([2.0, 3.0, last], *callbacks, epochs=epochs, **kwargs)

    run(2)
    (tmp_path / "best.pt").unlink()
    with pytest.warns(UserWarning, match=r"save_path='.*best.pt' does not exist.*epoch 1, score: 2 .*Copy it there"):
        trainer = run(3, resume_from="latest")
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[-1])
    assert ("The best model is not in" in capsys.readouterr().out) is not is_saved
    assert (tmp_path / "best.pt").exists() is is_saved


@pytest.mark.parametrize(("last", "best"), [(3.0, None), (0.5, 4)])
def test_the_best_model_of_an_abandoned_attempt_is_not_loaded(last, best, tmp_path, capsys):
    def run(script: list[float], **kwargs: Any) -> Any:
        states = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=2, save_at_end=False)
        callbacks = states, SaveBestModelCallback(tmp_path / "best.pt", "score")
        return scripted(script, *callbacks, epochs=len(script), **kwargs)

    run([3.0, 2.0, 1.0])  # its third epoch is as good as in no other attempt, and is not in its state
    trainer = run([3.0, 2.0, 4.0, last], resume_from="latest")
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[-1])
    says = r"The best model is not in .*best.pt', which is missing or holds another attempt's. So the model stays"
    assert bool(re.search(says, capsys.readouterr().out)) is (best is None)
    assert torch.load(tmp_path / "best.pt")["epoch"] == (best or 3)


@pytest.mark.parametrize("reset", [True, False])
def test_the_best_of_an_earlier_run_counts_only_without_a_reset(reset, tmp_path):
    callback = SaveBestModelCallback(tmp_path / "best.pt", "score", reset_on_train=reset)
    trainer = scripted([1, 2], callback)
    type(trainer).script = [4, 3]
    train(trainer, epochs=2, eval_dataset=True)
    assert callback.best_metric == (3 if reset else 1)
    assert torch.load(tmp_path / "best.pt")["score"] == callback.best_metric


def kept_scores(folder: Path) -> dict[str, float]:
    """The scores of the models that are kept, by the names of their files."""
    return {path.stem: torch.load(path)["score"] for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("second", "kept"),
    [
        ([9.0, 0.5, 9.0], {"best": 0.5, "best-epoch0002": 0.5, "best-epoch0003": 1.0}),
        ([9.0, 9.0, 1.5], {"best": 1.0, "best-epoch0002": 2.0, "best-epoch0003": 1.0}),
        ([0.5, 0.6, 0.7], {"best": 0.5, "best-epoch0001": 0.5, "best-epoch0002": 0.6}),
    ],
)
def test_models_that_are_kept_over_two_runs_are_never_removed(second, kept, tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "score", reset_on_train=False, keep=2)
    trainer = scripted([3.0, 2.0, 1.0], best)
    type(trainer).script = second
    train(trainer, epochs=3, eval_dataset=True)
    assert kept_scores(tmp_path) == kept


def test_kept_models_are_removed_when_the_next_run_starts_over(tmp_path):
    trainer = scripted([3.0, 2.0, 1.0], SaveBestModelCallback(tmp_path / "best.pt", "score", keep=2))
    assert kept_scores(tmp_path) == {"best": 1.0, "best-epoch0002": 2.0, "best-epoch0003": 1.0}
    type(trainer).script = [8.0, 9.0]
    train(trainer, epochs=2, eval_dataset=True)
    assert kept_scores(tmp_path) == {"best": 8.0, "best-epoch0001": 8.0, "best-epoch0002": 9.0}


def test_kept_models_stay_when_a_run_continues(here):
    best = SaveBestModelCallback(here / "kept" / "best.pt", "score", keep=2)
    saver = SaveTrainingStateCallback("states", save_every_n_epochs=1)
    trainer = scripted([1.0, 2.0, 9.0], best, saver, epochs=2)
    train(trainer, epochs=3, eval_dataset=True, resume_from="latest")
    assert kept_scores(here / "kept") == {"best": 1.0, "best-epoch0001": 1.0, "best-epoch0002": 2.0}


def test_folders_of_the_best_model_are_made(tmp_path):
    scripted([1], SaveBestModelCallback(tmp_path / "some" / "where" / "best.pt", "score"))
    assert (tmp_path / "some" / "where" / "best.pt").is_file()


def test_the_best_model_is_saved_in_the_current_folder(here):
    scripted([1], SaveBestModelCallback(watch_metric="score"))
    assert Path("best_model.pt").is_file()


@pytest.mark.parametrize("callback_class", [SaveBestModelCallback, EarlyStoppingCallback])
def test_a_watched_metric_that_was_never_recorded_is_an_error(callback_class, here):
    trainer = make_trainer([callback_class(watch_metric="eval_los_epoch")])
    with pytest.raises(ValueError, match=r"'eval_los_epoch'.: the run will not record it") as caught:
        train(trainer, eval_dataset=True)
    message = str(caught.value)
    assert "Did you mean 'eval_loss_epoch'?" in message
    assert "train_loss_epoch, eval_loss_epoch" in message


@pytest.mark.parametrize("callback_class", [SaveBestModelCallback, EarlyStoppingCallback])
def test_watching_the_evaluation_loss_without_one_is_an_error(callback_class, here):
    expected = rf"{callback_class.__name__}\(watch_metric='eval_loss_epoch'\).*train\(\) was given no eval_dataset"
    trainer = make_trainer([callback_class])
    with pytest.raises(ValueError, match=expected):
        train(trainer)
    assert trainer.progress.step == 0


# ---------------------------------------------------------------------- states of what watches a metric


def resumed(folder: Path, *stages: TrainerCallback) -> None:
    """Train an epoch with the first callback, and resume from its state for three with the second."""
    accuracies = [0.5, 0.6, 0.7, 0.8]
    for epochs, callback in zip((1, 4), stages, strict=True):
        record = listener(
            on_eval_epoch_end=lambda t, **_: t.run_history.update_metric("accuracy", accuracies[t.progress.epoch - 1])
        )
        saver = SaveTrainingStateCallback(folder / "states", save_every_n_epochs=1)
        trainer = make_trainer([record, callback, saver], seed=0)
        train(trainer, epochs=epochs, eval_dataset=True, resume_from="latest")


WATCHING: dict[str, Any] = {
    "SaveBestModelCallback": lambda **kwargs: SaveBestModelCallback("best.pt", **kwargs),
    "EarlyStoppingCallback": lambda **kwargs: EarlyStoppingCallback(9, **kwargs),
    "ModelEmaCallback": lambda **kwargs: ModelEmaCallback(save_path="ema.pt", **kwargs),
}


@pytest.mark.parametrize("name", WATCHING)
def test_another_metrics_best_value_does_not_count_on_resuming(name, here):
    first, again = WATCHING[name](), WATCHING[name](watch_metric="accuracy", greater_is_better=True)
    before = r"starts over: it watches 'accuracy' \(greater is better\), but its training state is for '\w*eval_loss"
    with pytest.warns(UserWarning, match=f"{name} {before}"):
        resumed(here, first, again)
    assert first.best_metric > 0.8  # a loss, which as an accuracy would be the best for ever
    assert again.best_metric == 0.8


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", WATCHING)
def test_a_best_value_of_an_older_version_counts_on_resuming(name, here):
    first, again = (WATCHING[name](watch_metric="accuracy", greater_is_better=False) for _ in range(2))
    resumed(here, first, again)
    assert again.best_metric == 0.5
    old = {key: value for key, value in again.state_dict().items() if key not in ("watch_metric", "greater_is_better")}
    first.load_state_dict(old)
    assert first.best_metric == 0.5


# ------------------------------------------------------------------------------------- early stopping


@pytest.mark.parametrize(
    ("script", "arguments", "epochs"),
    [
        ([3, 2, 1], {}, 3),
        ([3, 3, 1], {}, 2),
        ([3, 3, 3, 3], {"early_stopping_patience": 2}, 3),
        ([3, 4, 2, 3, 4, 1], {"early_stopping_patience": 2}, 5),
        ([1, 2, 3], {"greater_is_better": True}, 3),
        ([1, 2, 2], {"greater_is_better": True}, 3),
        ([1, 2, 2, 3], {"greater_is_better": True}, 3),
        ([3, 2.95, 2], {"early_stopping_threshold": 0.1}, 2),
        ([3, 2.85, 2], {"early_stopping_threshold": 0.1}, 3),
        ([3, 3, 2], {"early_stopping_threshold": 0}, 2),
        ([3, 2.999, 2], {"early_stopping_threshold": 0}, 3),
        # small steps count from the best value that was an improvement
        ([3, 2.94, 2.88, 2], {"early_stopping_threshold": 0.1, "early_stopping_patience": 2}, 4),
        ([math.nan, math.nan, 1], {"early_stopping_patience": 2}, 2),
        ([math.nan, 3, 2], {"early_stopping_patience": 2}, 3),
        ([3, math.nan, 2], {"early_stopping_patience": 2}, 3),
    ],
)
def test_early_stopping_stops_after_epochs_without_improvement(script, arguments, epochs):
    trainer = scripted(script, EarlyStoppingCallback(watch_metric="score", **arguments))
    assert trainer.progress.epoch == len(trainer.run_history.get_metric_values("score")) == epochs
    if epochs < len(script):
        assert "score" in trainer.stop_reason
    else:
        assert trainer.stop_reason is None or epochs == len(script)


def test_an_early_stops_reason_names_threshold_and_patience():
    def reason(script: list[float], *arguments: Any, **kwargs: Any) -> str:
        callback = EarlyStoppingCallback(*arguments, watch_metric="score", greater_is_better=False, **kwargs)
        trainer = scripted(script, callback)
        assert callback.best_metric == min(script[: trainer.progress.epoch])
        return trainer.stop_reason

    assert reason([0.0073, 0.0073, 0.0031]) == (
        "score has not improved for 1 epoch (early_stopping_patience). Best 0.0073, smaller is better."
    )
    assert reason([0.0593, 0.0499, 0.0419]) == (
        "score has improved by 0.0094 (16 %), less than 0.01 (early_stopping_threshold), in 1 epoch "
        "(early_stopping_patience). Best 0.0499, smaller is better. To train on while it improves, pass "
        'early_stopping_threshold=0, or threshold_mode="relative".'
    )
    assert reason([4.0, 3.75, 3.5], early_stopping_threshold=0.25).startswith(
        "score has improved by 0.25 (6.2 %), not more than 0.25 (early_stopping_threshold)"
    )
    assert reason([2.0, 1.995, 1.996, 1.0], 2) == (
        "score has improved by 0.005 (0.25 %), less than 0.01 (early_stopping_threshold), in 2 epochs "
        "(early_stopping_patience). Best 1.995, smaller is better."
    )


@pytest.mark.parametrize(("greater", "script"), [(False, [1e-5, 9.8e-6, 9.75e-6]), (True, [-100.0, -98.0, -97.5])])
def test_a_relative_threshold_is_a_fraction_of_the_best_value(greater, script):
    callback = EarlyStoppingCallback(1, 0.01, "score", greater, threshold_mode="relative")
    trainer = scripted([*script, 0.0], callback)
    assert trainer.progress.epoch == 3  # 2 % are enough, half a percent is not
    assert re.match(
        r"score has improved by 0\.5\d? %, less than 1 % \(early_stopping_threshold\), in ", trainer.stop_reason
    )


@pytest.mark.parametrize(("script", "epochs"), [([0.55, 0.4, 0.3], 1), ([0.45, 0.4, 0.3], 3)])
def test_the_first_value_must_improve_on_a_baseline(script, epochs):
    trainer = scripted(script, EarlyStoppingCallback(1, 0, "score", greater_is_better=False, baseline=0.5))
    assert trainer.progress.epoch == epochs
    if epochs == 1:
        assert trainer.stop_reason == (
            "score has not improved on the baseline 0.5 for 1 epoch (early_stopping_patience). Best 0.55, smaller is "
            "better."
        )


@pytest.mark.parametrize("reset", [True, False])
def test_early_stopping_restarts_in_the_next_run_by_default(reset):
    callback = EarlyStoppingCallback(early_stopping_patience=2, watch_metric="score", reset_on_train=reset)
    trainer = scripted([1, 2], callback)  # one epoch of patience is used
    assert trainer.stop_reason is None
    type(trainer).script = [3, 2.5, 2]
    train(trainer, epochs=3, eval_dataset=True)
    assert len(trainer.run_history.get_metric_values("score")) == (3 if reset else 1)


@pytest.mark.parametrize(("patience_in", "update"), [("evaluations", 3), ("epochs", 9)])
def test_patience_counts_evaluations_in_mid_epoch_or_epochs(patience_in, update):
    model = make_model()
    stopping = EarlyStoppingCallback(2, 0.0, "intermediate_eval_loss", patience_in=patience_in)
    unmoved = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = make_trainer([StepBasedEvaluationCallback(1), stopping], model=model, optimizer=unmoved)
    train(trainer, epochs=5, eval_dataset=True)
    assert trainer.progress.update == update  # an epoch has three; the first value is the best
    assert f"has not improved for 2 {patience_in} (early_stopping_patience)" in trainer.stop_reason


@pytest.mark.parametrize("saves_first", [True, False])
def test_a_resumed_run_stops_early_at_the_same_epoch(saves_first, tmp_path):
    def run(folder: str, **kwargs: Any) -> Any:
        states = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1, save_at_end=False)
        stopping = EarlyStoppingCallback(3, 5.0, "intermediate_eval_loss", patience_in="evaluations")
        evaluation = StepBasedEvaluationCallback(2)
        callbacks = [evaluation, states, stopping] if saves_first else [evaluation, stopping, states]
        return train(make_trainer(callbacks, seed=1), epochs=9, eval_dataset=True, **kwargs)

    whole = run("whole")
    assert whole.progress.update == 8  # the first evaluation, after two updates, and three without an improvement
    for state in sorted((tmp_path / "whole").glob("update-*")):
        resumed = run(f"after {state.name}", resume_from=state)
        assert resumed.stop_reason == whole.stop_reason
        assert resumed.progress == whole.progress
        assert equal_weights(weights(resumed.model), weights(whole.model))


def test_a_run_pauses_at_a_time_limit_and_can_be_resumed(here):
    whole = train(make_trainer(seed=1), epochs=2, eval_dataset=True)
    updates, trainer = [], make_trainer()
    while trainer.progress.epochs_completed != 2:
        limit = TimeLimitCallback(timedelta(microseconds=1))
        trainer = make_trainer([limit, SaveTrainingStateCallback("states", save_at_end=False)], seed=1)
        train(trainer, epochs=2, eval_dataset=True, resume_from="latest")
        updates.append(trainer.progress.update)
        assert trainer.stop_reason in (None, "Stopping: the time limit of 0:00:00.000001 is reached.")
    assert updates == [1, 2, 3, 3, 4, 5, 6, 6]  # after each update, and after the first epoch's evaluation
    assert trainer.stop_reason is None
    assert equal_weights(weights(trainer.model), weights(whole.model))
    assert trainer.run_history.to_dict() == whole.run_history.to_dict()


def test_a_run_within_its_time_limit_is_not_stopped():
    trainer = train(make_trainer([TimeLimitCallback(3600)]))
    assert trainer.stop_reason is None
    assert trainer.progress.update == 3


@pytest.mark.parametrize(
    ("limit", "error"), [(0, ValueError), (timedelta(0), ValueError), ("1h", TypeError), (math.nan, ValueError)]
)
def test_a_time_limit_must_be_positive(limit, error):
    with pytest.raises(error, match=r"^limit=\S+ must be (greater than 0|a number)"):
        TimeLimitCallback(limit)


def test_a_stopped_run_ends_with_the_best_model(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "score")
    trainer = scripted([2, 1, 3, 4, 5], best, EarlyStoppingCallback(2, watch_metric="score"))
    assert trainer.progress.epoch == 4
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[1])


@pytest.mark.parametrize("event", ["on_eval_epoch_end", "on_training_run_epoch_end"])
@pytest.mark.parametrize("saves_first", [True, False])
def test_a_run_stopped_at_its_target_keeps_what_reached_it(event, saves_first, tmp_path):
    def stop(trainer: Trainer, **_: Any) -> None:
        if trainer.progress.epoch == 3:
            raise StopTrainingError("the target is reached")

    best = SaveBestModelCallback(tmp_path / "best.pt", "score")
    target = listener(**{event: stop})
    trainer = scripted([3, 2, 1, 4], *([best, target] if saves_first else [target, best]))
    assert (best.best_metric, best.best_metric_epoch) == (1, 3)
    assert equal_weights(torch.load(tmp_path / "best.pt")["model_state_dict"], weights(trainer.model))


def test_a_stop_after_a_step_saves_no_model_for_an_older_value(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", "score")
    trainer = scripted([3, 2, 1], best, raises_at(7, StopTrainingError("enough"), "on_train_step_checkpoint"))
    assert best.best_metric_epoch == 2
    assert equal_weights(weights(trainer.model), trainer.weights_after_epoch[1])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"early_stopping_patience": 0}, ValueError, "patience=0 must be at least 1"),
        ({"early_stopping_patience": 1.5}, TypeError, r"patience=1\.5 must be an integer"),
        ({"early_stopping_threshold": -1}, ValueError, "threshold=-1 must be 0 or more"),
        ({"early_stopping_threshold": math.nan}, ValueError, "threshold=nan must be 0 or more"),
        ({"patience_in": "updates"}, ValueError, "patience_in='updates' must be 'epochs' or 'evaluations'"),
    ],
)
def test_early_stopping_refuses_invalid_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        EarlyStoppingCallback(**arguments)


# -------------------------------------------------------------------------------------- move modules


class OnMeta(Trainer):
    """A trainer on the meta device, to see what is moved to a device."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


@pytest.mark.parametrize("event", ["on_training_run_start", "on_evaluation_run_start", "on_predict_run_start"])
def test_modules_that_are_attributes_are_moved_to_the_device(event):
    trainer = make_trainer([MoveModulesToDeviceCallback], trainer_class=OnMeta)
    trainer.metric = nn.Linear(2, 2)
    trainer.loss_func = nn.CrossEntropyLoss(weight=torch.ones(3))
    trainer.callback_handler.call_event(event, trainer)
    assert trainer.metric.weight.device.type == "meta"
    assert trainer.loss_func.weight.device.type == "meta"
    assert {p.device.type for p in trainer.model.parameters()} == {"cpu"}


def shipped_callbacks() -> Any:
    """Each shipped callback in a run of its own: the weights, and what ranks but the first print."""
    warnings.filterwarnings("ignore", ".*cannot synchronise batch norm on 'cpu'")  # with several processes
    results, home = {}, Path.cwd()
    with shared_folder() as folder:
        for callback_class in SHIPPED:
            name = callback_class.__name__
            work = folder / f"shipped {name}"
            work.mkdir(exist_ok=True)
            model = float64_model()
            output = io.StringIO()
            os.chdir(work)  # where callbacks write by default
            with redirect_stdout(output), redirect_stderr(output):
                trainer = adamw_trainer(model, callbacks=[build(callback_class)])
                data = float64_data(20)
                trainer.train(data, 2, float64_data(7), per_device_batch_size=3, **RUN.get(name, {}))
                evaluated = trainer.evaluate(float64_data(5), per_device_batch_size=2)
                predicted = trainer.predict(float64_data(5), per_device_batch_size=2)
            results[name] = {
                "weights": weights(model),
                "evaluated": evaluated,
                "predicted": predicted,
                "printed": output.getvalue() if rank() else "",
            }
            os.chdir(home)
    return results


@pytest.mark.soak
@pytest.mark.parametrize("name", some_of(callback_class.__name__ for callback_class in SHIPPED))
@two_are_enough
def test_a_shipped_callback_serves_several_processes(ranks, name):
    results = [result[name] for result in ranks(shipped_callbacks)]
    assert len(results) == ranks.world_size
    for result in results:
        assert equal_weights(result["weights"], results[0]["weights"])
        assert result["evaluated"] == results[0]["evaluated"]
        assert torch.equal(result["predicted"], results[0]["predicted"])
        assert result["printed"] == ""


def default_callbacks() -> Any:
    """Train with the default callbacks; the test checks the output of the launch."""
    with shared_folder() as folder:
        model = float64_model()
        best = SaveBestModelCallback(folder / "best.pt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        others = [ProgressTableCallback(show_always=True), best, EarlyStoppingCallback(2, 0.0)]
        trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[*get_default_callbacks(), *others])
        trainer.train(float64_data(20), 3, float64_data(9), per_device_batch_size=2)
        return {"weights": weights(model), "best": best.best_metric, "history": trainer.run_history.to_dict()}


@two_are_enough
def test_only_the_first_process_prints(ranks):
    results = ranks(default_callbacks)
    assert len(results) == ranks.world_size
    assert results.output.count("Starting training run") == 1
    assert results.output.count("Loading the best model") == 1
    assert len(re.findall(r"^1/3 .*s$", results.output, re.MULTILINE)) == 1
    assert results.output.count("Best: epoch") == 2  # in lines, and of a table
    assert len({result["best"] for result in results}) == 1
    assert all(equal_weights(result["weights"], results[0]["weights"]) for result in results)
