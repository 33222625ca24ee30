"""The progress bar: its numbers, its end, and lines where there is no terminal."""

from __future__ import annotations

import math
import re
import sys
import time
from typing import Any

import pytest
import torch

from pytorch_accel_lite import StopTrainingError, Trainer
from pytorch_accel_lite.callbacks import ProgressBarCallback
from tests.small_models import Stream, listener, make_data, make_trainer, train
from tests.terminals import Terminal


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


@pytest.mark.extension("model_ema")
def test_the_speed_leaves_out_predictions_and_evaluations(capsys, monkeypatch):
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(Trainer):
        def calculate_train_batch_loss(self, batch):
            now[0] += 0.1
            return super().calculate_train_batch_loss(batch)

        def calculate_eval_batch_loss(self, batch):
            now[0] += 100
            return super().calculate_eval_batch_loss(batch)

        def calculate_predict_batch_output(self, batch):
            now[0] += 100
            return super().calculate_predict_batch_output(batch)

    look = listener(on_update_end=lambda t, **_: t.predict(make_data()))
    callbacks = [ModelEmaCallback(save_path=None), look, ProgressBarCallback(line_every_seconds=1e-9)]
    train(make_trainer(callbacks, trainer_class=Slow), size=10, eval_dataset=True, evaluate_every="1 updates")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch")]
    rates = [re.search(r"samples/s ([\d.]+)", line)[1] for line in lines[1:]]
    assert rates == ["20"] * 4


def test_the_progress_bar_shows_the_schedules_learning_rate(capfd):
    train(
        make_trainer([ProgressBarCallback(show_always=True, refresh_seconds=0)]),
        size=6,
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    bars = [float(lr) for lr in re.findall(r"lr=([\d.e+-]+)", capfd.readouterr().err)]
    assert bars[-1] == 0.025  # of the last update: the schedule is at 0.0125
    assert 0.05 in bars


@pytest.mark.extension("streams")
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


@pytest.mark.extension("named_schedules")
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_numbers_that_fit_beside_the_bar_are_not_cut(columns, monkeypatch):
    terminal = Terminal(columns, monkeypatch)
    with terminal.streams():
        bar = ProgressBarCallback(refresh_seconds=0)
        train(make_trainer([bar]), epochs=2, eval_dataset=True, create_scheduler_fn="linear")
    bars = [bar for bar in re.split(r"[\r\n]|\x1b\[\d*\w", terminal.written) if bar.startswith("Epoch 2")]
    assert bars
    for shown in bars:
        drawn, _, numbers = shown.rstrip().partition("|")[2].partition("|")
        count, *values = numbers.split(", ")
        assert re.fullmatch(r" \d/3", count)
        assert len(drawn) >= 10
        names = [re.fullmatch(r"(.+)=([\d.,:e+-]+)", value)[1] for value in values]
        assert names == ["loss", "run ETA", "samples/s", "eval_loss", "lr"][: len(names)]
    assert len(names) == {60: 2, 80: 3, 200: 5}[columns]
    if columns == 200:
        assert bars[-1].rstrip().endswith(f"lr={0.1 / 6:.3g}")  # of the last update, not the next


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
