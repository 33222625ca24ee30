"""The table of a run, its summary, and lines where there is no table."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanAbsoluteError

from pytorch_accel_lite import StopTrainingError, Trainer, callbacks, get_default_callbacks
from pytorch_accel_lite.callbacks import (
    DEFAULT_CALLBACKS,
    EarlyStoppingCallback,
    ProgressBarCallback,
    ProgressTableCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
)
from pytorch_accel_lite.extension_tools import texts_and_pages
from pytorch_accel_lite.extensions.progress_table import progress_table_callback
from tests.launching import two_are_enough
from tests.ranks import rank, shared_folder
from tests.small_models import (
    Stream,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_model,
    make_trainer,
    notes_of_error,
    raises_at,
    train,
    weights,
)
from tests.terminals import Terminal


def table(*others: Any, **kwargs: Any) -> list[Any]:
    return [ProgressTableCallback(show_always=True, **kwargs), *others]


def printed(capsys: Any) -> list[str]:
    return capsys.readouterr().out.splitlines()


def rows(lines: list[str]) -> list[list[str]]:
    """The cells of the rows of a table."""
    return [line.split() for line in lines if re.match(r"(\d+(/\d+)?|step \d+) ", line)]


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def _notebook(monkeypatch):
    monkeypatch.setattr(texts_and_pages, "in_notebook", lambda: True)
    monkeypatch.setattr(progress_table_callback, "in_notebook", lambda: True)


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.usefixtures("_notebook")
def test_a_notebook_shows_the_last_of_many_epochs_and_the_best(capsys, monkeypatch):
    monkeypatch.setattr(progress_table_callback, "_NOTEBOOK_ROWS", 3)
    worse = listener(on_train_epoch_end=lambda t: t.model[2].bias.data.fill_(10.0 * t.progress.epoch))
    model = make_model()
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    train(make_trainer([worse, ProgressTableCallback()], model, optimizer=frozen), epochs=6, eval_dataset=True)
    outputs = [ast.literal_eval(line) for line in printed(capsys) if line.startswith("{")]
    for kind in ("text/plain", "text/html"):
        found = [re.findall(r"(\d)/6", output[kind]) for output in outputs]
        assert found[:4] == [["1"], ["1", "2"], ["1", "2", "3"], ["1", "2", "3", "4"]]  # the best, and three
        assert found[5:] == [["1", "4", "5", "6"]] * 2
        assert "(the last 3 of 6 rows; all metrics are in trainer.run_history)" in outputs[-1][kind]


@pytest.mark.usefixtures("_notebook")
@pytest.mark.extension("sanity_check")
def test_a_run_that_fails_early_shows_no_empty_table(capsys):
    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        train(make_trainer([ProgressTableCallback()], loss_func=fail), eval_dataset=True)
    *_, last = [ast.literal_eval(line) for line in printed(capsys) if line.startswith("{")]
    for kind in ("text/plain", "text/html"):
        assert "Failed (RuntimeError) before the first epoch" in last[kind]
        assert "train loss" not in last[kind]


@pytest.mark.extension("metrics")
def test_an_epoch_is_a_row_of_aligned_numbers(capsys):
    from pytorch_accel_lite.callbacks import MetricsCallback

    trainer = make_trainer(table(MetricsCallback({"mae": MeanAbsoluteError()})))
    train(trainer, epochs=3, eval_dataset=True)
    head, rule, *body, blank, summary, best = printed(capsys)
    assert re.split(" {2,}", head) == ["epoch", "train loss", "eval loss", "mae", "lr", "time"]
    assert {len(line) for line in body} == {len(head)} == {len(rule)}
    losses = [f"{value:.4f}" for value in trainer.run_history.get_metric_values("train_loss_epoch")]
    found = rows(body)
    assert [row[0] for row in found] == ["1/3", "2/3", "3/3"]
    assert [row[1] for row in found] == losses
    assert all(re.fullmatch(r"\d\.\d{4}", row[3]) for row in found)
    assert [row[4] for row in found] == ["1.00e-01"] * 3
    assert all(re.fullmatch(r"\d+\.\d+s", row[5]) for row in found)
    assert blank == ""
    assert re.fullmatch(r"Trained 3 epochs, 9 updates, in [\d.]+s \([\d,]+ samples/s\)\.", summary)
    assert re.fullmatch(r"Best: epoch \d, eval loss [\d.]+\.", best)


def test_the_best_value_is_marked_and_named_in_the_summary(capsys, tmp_path):
    values = iter([3.0, 1.0, 2.0, 0.5, 0.7])
    record = listener(on_eval_epoch_end=lambda t, **_: t.run_history.update_metric("score", next(values)))
    best = SaveBestModelCallback(tmp_path / "best.pt", "score", False, load_saved_checkpoint=False)
    train(make_trainer(table(record, best)), epochs=5, eval_dataset=True)
    lines = printed(capsys)
    assert [re.search(r"\d\.\d{4}\*", line) is not None for line in lines[2:7]] == [True, True, False, True, False]
    assert re.search(r"Best: epoch 4, score 0\.5000\.", " ".join(lines))


def test_without_a_watched_metric_the_loss_of_the_evaluation_is(capsys):
    trainer = make_trainer(table())
    train(trainer, epochs=2, eval_dataset={"clean": make_data(), "noisy": make_data(4)})
    head, _, first, *_, summary = printed(capsys)
    assert re.split(" {2,}", head)[:4] == ["epoch", "train loss", "clean eval loss", "noisy eval loss"]
    assert re.search(rf"{trainer.run_history.get_metric_values('clean_eval_loss_epoch')[0]:.4f}\* ", first)
    assert "Best: epoch 2, clean eval loss" in summary
    train(make_trainer(table()), epochs=2)
    assert "Best" not in "".join(printed(capsys))


@pytest.mark.extension("model_ema")
def test_the_marked_best_is_the_models_beside_a_saved_average(tmp_path, capsys):
    average = callbacks.ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt")
    best = SaveBestModelCallback(tmp_path / "best.pt")
    train(make_trainer(table(average, best)), 2, eval_dataset=True)
    said = " ".join(printed(capsys))
    assert re.search(r"Loading the best model: epoch 2, eval_loss_epoch: ", said)
    assert re.search(r"Best: epoch 2, eval loss ", said)
    train(make_trainer(table(average)), 1, eval_dataset=True)
    assert "Best: epoch 1, ema_model eval loss " in " ".join(printed(capsys))


def test_epochs_without_an_evaluation_have_empty_cells(capsys):
    train(make_trainer(table()), epochs=3, eval_dataset=True, eval_every_n_epochs=2)
    head, _, *body = printed(capsys)[:5]
    assert "eval loss" in head
    assert [len(row) for row in rows(body)] == [4, 5, 5]
    assert len({line.index("1.00e-01") for line in body}) == 1


def test_an_evaluation_within_an_epoch_is_a_row_of_the_table(capsys):
    train(make_trainer(table(StepBasedEvaluationCallback(2))), epochs=2, eval_dataset=True)
    lines = printed(capsys)
    assert [line[:8].strip() for line in lines[2:7]] == ["step 2", "1/2", "step 1", "step 3", "2/2"]
    assert [len(row) for row in rows(lines[2:7])] == [5] * 5  # "step" is a word, and there is no train loss
    assert "intermediate" not in lines[0]


def test_a_custom_evaluation_in_a_run_is_in_its_row(capsys):
    nested = listener(on_training_run_epoch_end=lambda t: t.evaluate(make_data(4)))
    trainer = make_trainer(table(nested))
    train(trainer, epochs=2, eval_dataset=True)
    head, _, first, second, _, summary, _ = printed(capsys)
    assert re.split(" {2,}", head)[3] == "evaluation_loss"
    assert f"{trainer.run_history.get_latest_metric('evaluation_loss'):.4f}" in second
    assert len(first.split()) == len(second.split()) == 6
    assert "Trained 2 epochs" in summary


def test_an_evaluation_outside_a_run_prints_a_line(capsys):
    trainer = make_trainer(table())
    found = trainer.evaluate(make_data())["evaluation_loss"]
    (line,) = printed(capsys)
    assert re.fullmatch(rf"Evaluated in [\d.]+s: evaluation_loss {found:.6g}", line)
    train(trainer, eval_dataset=True)
    assert trainer.evaluate()
    assert printed(capsys)[-1].startswith("Evaluated in")


@pytest.mark.extension("streams")
def test_epochs_of_data_without_a_length_have_numbers_alone(capsys):
    train(make_trainer(table()), None, max_num_train_steps=4, train_dataset=Stream(6), train_dataloader_kwargs={})
    lines = printed(capsys)
    assert [row[0] for row in rows(lines)] == ["1", "2"]
    assert lines[-1].startswith("Trained 2 epochs, 4 updates, in")


def test_numbers_in_the_table_are_equally_precise(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    given = {"large": 1234567.0, "small": 1.5e-5, "count": 12345, "tensor": torch.tensor(2 / 3), "none": float("nan")}
    words = {"text": "good", "many": torch.tensor([1, 2])}

    def record(trainer: Trainer) -> None:
        for name, value in (given | words).items():
            trainer.run_history.update_metric(name, value)

    train(make_trainer(table(listener(on_train_epoch_end=record))))
    head, _, row = printed(capsys)[:3]
    assert re.split(" {2,}", head)[2:-2] == list(given)
    assert row.split()[2:-2] == ["1.23e+06", "1.50e-05", "12,345", "0.6667", "nan"]


def test_a_column_widens_once_when_a_loss_grows(capsys):
    losses = [0.5, 9999.99994, 24039.7578, 7.37e7, 3.0, 1e-7, -2.5e30]

    def record(trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("growing", losses[trainer.progress.epoch - 1])
        trainer.run_history.update_metric("steady", 0.25)

    train(make_trainer(table(listener(on_train_epoch_end=record))), epochs=len(losses))
    head, _, *body = printed(capsys)[: 2 + len(losses)]
    assert [row[2] for row in rows(body)] == [
        *("0.5000", "9999.9999"),
        *("2.40e+04", "7.37e+07", "3.00e+00", "1.00e-07", "-2.50e+30"),
    ]
    assert {row[3] for row in rows(body)} == {"0.2500"}
    assert {len(line) for line in body} == {len(head)}


def test_a_metric_recorded_later_is_a_new_last_column(capsys):
    def record(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch > 1:
            trainer.run_history.update_metric("late", 0.25)

    train(make_trainer(table(listener(on_eval_epoch_end=record))), epochs=3, eval_dataset=True)
    first, _, _, second, _, *body = printed(capsys)[:7]
    assert re.split(" {2,}", first) == ["epoch", "train loss", "eval loss", "lr", "time"]
    assert second == f"{first}       late"
    assert [line.endswith("     0.2500") for line in body] == [True, True]


@pytest.mark.extension("throughput")
def test_a_metric_that_is_not_recorded_has_no_column(capsys):
    train(make_trainer(table(callbacks.ThroughputCallback())), epochs=2)
    head = re.split(" {2,}", printed(capsys)[0])
    assert head == ["epoch", "train loss", "samples_per_second", "lr", "time"]


@pytest.mark.sampled
@pytest.mark.extension("streams")
@pytest.mark.parametrize(("updates", "every"), [(45, 10), (420, 20)])
def test_a_stream_has_rows_within_its_epoch_with_running_means(updates, every, capsys):
    seen: list[float] = []
    gather = listener(on_train_step_end=lambda t, batch_output, **_: seen.append(batch_output["loss"].item()))
    callbacks = table(gather, StepBasedEvaluationCallback(2 * every))
    kwargs = {"train_dataset": Stream(2 * updates), "train_dataloader_kwargs": {}, "eval_dataset": True}
    train(make_trainer(callbacks), None, max_num_train_steps=updates, **kwargs)
    *within, last = rows(printed(capsys))
    steps = [*range(every, updates, every)]
    assert [row[:2] for row in within] == [["step", str(step)] for step in steps]
    means = [sum(seen[step - every : step]) / every for step in steps]
    assert [float(row[2]) for row in within] == pytest.approx(means, rel=0.01, abs=1e-4)
    assert [len(row) for row in within] == [6 if step % (2 * every) == 0 else 5 for step in steps]
    assert last[0] == "1"


def rows_of_a_stream() -> list[float]:
    """Train with a table on the first process, and return the losses of this process."""
    seen: list[float] = []
    gather = listener(on_train_step_end=lambda t, batch_output, **_: seen.append(batch_output["loss"].item()))
    callbacks = [ProgressTableCallback(show_always=rank() == 0), gather]
    kwargs = {"train_dataset": Stream(120), "train_dataloader_kwargs": {}}
    train(make_trainer(callbacks), None, max_num_train_steps=25, **kwargs)
    return seen


@pytest.mark.extension("streams")
@two_are_enough
def test_rows_within_an_epoch_are_means_over_all_processes(ranks):
    results = ranks(rows_of_a_stream)
    within = [row for row in rows(results.output.splitlines()) if row[0] == "step"]
    assert [row[1] for row in within] == ["10", "20"]
    for row, start in zip(within, (0, 10), strict=True):
        losses = [loss for result in results for loss in result[start : start + 10]]
        assert float(row[2]) == pytest.approx(sum(losses) / len(losses), rel=0.01, abs=1e-4)


def test_rows_within_an_epoch_can_be_requested(capsys):
    train(make_trainer([ProgressTableCallback(show_always=True, row_every_n_updates=2)]), epochs=2)
    assert [line[:8].strip() for line in printed(capsys)[2:7]] == ["step 2", "1/2", "step 1", "step 3", "2/2"]
    with pytest.raises(ValueError, match="row_every_n_updates=0 must be"):
        ProgressTableCallback(row_every_n_updates=0)


# ----------------------------------------------------------------------------------------------- width


@pytest.mark.extension("monitoring", "profiling", "metrics")
def test_a_wide_table_is_cut_and_names_the_hidden_columns(capsys, monkeypatch):
    from pytorch_accel_lite.callbacks import MetricsCallback

    def follow(trainer: Trainer) -> None:
        monkeypatch.setenv("COLUMNS", {1: "45", 2: "160"}.get(trainer.progress.epoch, "80"))

    metrics = MetricsCallback({"mae": MeanAbsoluteError()})
    measured = [callbacks.GradientNormCallback(), callbacks.TimingCallback()]
    others = [metrics, *measured, listener(on_train_epoch_start=follow)]
    trainer = train(make_trainer(table(*others)), epochs=3, eval_dataset=True)
    lines = printed(capsys)
    notes = [line for line in lines if "more metric" in line]
    assert len(notes) == 3  # once for each width
    heads = [line for line in lines if line.startswith("epoch")]
    assert [len(head) <= width for head, width in zip(heads, (45, 160, 80), strict=True)] == [True] * 3
    columns = [re.split(" {2,}", head) for head in heads]
    assert columns[0] == ["epoch", "train loss", "eval loss", "time"]
    assert len(columns[1]) > len(columns[2]) > len(columns[0])
    for column, note in zip(columns, notes, strict=True):
        hidden = int(re.match(r"\((\d+) more", note)[1])
        # TimingCallback's time of an epoch is the column "time". The rate is in no history without a callback for it.
        assert hidden + len(column) == len([*trainer.run_history.get_metric_names(), "epoch"]) + ("lr" in column)


@pytest.mark.extension("metrics")
def test_metrics_can_be_chosen(capsys):
    from pytorch_accel_lite.callbacks import MetricsCallback

    metrics = MetricsCallback({"mae": MeanAbsoluteError()})
    chosen = table(metrics, metrics=["mae", "train_loss_epoch"])
    train(make_trainer(chosen), eval_dataset=True)
    assert re.split(" {2,}", printed(capsys)[0]) == ["epoch", "mae", "train loss", "lr", "time"]


def test_metrics_that_will_not_be_recorded_are_refused():
    trainer = make_trainer(table(metrics=["eval_los_epoch"]))
    with pytest.raises(ValueError, match=r"ProgressTableCallback\(metrics=.*Did you mean 'eval_loss_epoch'\?"):
        train(trainer, eval_dataset=True)
    assert trainer.progress.update == 0
    with pytest.raises(TypeError, match=r"metrics='accuracy' must be a list of names. Write: metrics=\['accuracy'\]"):
        ProgressTableCallback(metrics="accuracy")


# --------------------------------------------------------------------------------------------- summary


def test_the_summary_says_where_the_run_has_written_things(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saving = [SaveBestModelCallback("best.pt"), SaveTrainingStateCallback("states", save_every_n_epochs=1)]
    train(make_trainer(table(*saving)), epochs=2, eval_dataset=True)
    lines = printed(capsys)
    loading = next(number for number, line in enumerate(lines) if line.startswith("Loading the best model"))
    assert lines[loading + 1] == ""  # what other callbacks say at the end comes before
    assert lines[-2:] == ["  best model:      best.pt", "  training states: states"]
    # A run that fails before it saves has written neither.
    with pytest.raises(ValueError, match="broken"):
        train(
            make_trainer(table(SaveBestModelCallback("best.pt"), raises_at(1, ValueError("broken")))), eval_dataset=True
        )
    assert "best.pt" not in capsys.readouterr().out


@pytest.mark.extension("metrics_file")
def test_the_file_of_metrics_is_named_at_the_end(capsys, here):
    train(make_trainer(table(callbacks.MetricsFileCallback("metrics.jsonl"))))
    assert printed(capsys)[-1] == "  metrics: metrics.jsonl"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("broken"), "Failed (ValueError) in epoch 2, after update 5, in "),
        (KeyboardInterrupt(), "Interrupted in epoch 2, after update 5, in "),
        (StopTrainingError("enough"), "Stopped in epoch 2, after update 5, in "),
    ],
)
def test_the_summary_of_a_run_that_ends_early_is_true(error, said, capsys):
    trainer = make_trainer(table(raises_at(5, error)))
    try:
        train(trainer, epochs=3, eval_dataset=True)
    except type(error):
        pass
    lines = printed(capsys)
    (summary,) = [line for line in lines if said in line]
    assert "Best: epoch 1," in " ".join(lines[lines.index(summary) :])
    assert not [line for line in lines if line.startswith("Trained")]
    train(trainer, epochs=1)
    assert printed(capsys)[-1].startswith("Trained 1 epoch, 3 updates,")


@pytest.mark.extension("sanity_check")
def test_a_run_that_fails_in_its_sanity_check_has_no_epoch(capsys):
    with pytest.raises(RuntimeError):
        train(make_trainer([ProgressTableCallback]), eval_dataset=TensorDataset(torch.ones(4, 3), torch.ones(4, 1)))
    assert "Failed (RuntimeError) before the first epoch, after 0." in capsys.readouterr().out


def test_a_short_run_does_not_report_its_time(capsys):
    train(make_trainer([ProgressTableCallback]))
    assert "Time:" not in capsys.readouterr().out


def test_the_part_of_an_epoch_that_was_trained_is_a_row(capsys):
    trainer = make_trainer(table(raises_at(5, StopTrainingError("enough"))))
    train(trainer, epochs=3)
    (part,) = [line for line in printed(capsys) if line.startswith("step 2 ")]
    assert part.split()[2] == f"{trainer.run_history.get_latest_metric('train_loss_epoch'):.4f}"


def test_the_reason_of_a_stop_comes_last(capsys):
    trainer = make_trainer(table(EarlyStoppingCallback(early_stopping_patience=1)), optimizer=None)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    train(trainer, epochs=5, eval_dataset=True)
    lines = printed(capsys)
    assert [row[0] for row in rows(lines)] == ["1/5", "2/5"]
    assert lines[-3].startswith("Stopped in epoch 2, after update 6")
    assert lines[-1].startswith(
        "Stopped: eval_loss_epoch has not improved for 1 epoch (early_stopping_patience). Best "
    )


def test_a_resumed_run_continues_its_numbers_and_its_best_epoch(tmp_path, capsys):
    def run(epochs: int, **kwargs: Any) -> list[str]:
        values = {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3}
        record = listener(
            on_eval_epoch_end=lambda t, **_: t.run_history.update_metric("score", values[t.progress.epoch])
        )
        best = SaveBestModelCallback(tmp_path / "best.pt", "score", greater_is_better=False)
        saver = SaveTrainingStateCallback(tmp_path / "states")
        train(make_trainer(table(record, best, saver)), epochs=epochs, eval_dataset=True, **kwargs)
        return printed(capsys)

    assert "Best: epoch 1, score 0.1000." in " ".join(run(2))
    lines = run(4, resume_from="latest")
    assert [row[0] for row in rows(lines)] == ["3/4", "4/4"]
    assert not [line for line in lines if re.search(r"\d\*", line)]
    said = " ".join(lines)
    assert "Trained epochs 3 to 4, 6 updates, in" in said
    assert "Best: epoch 1, score 0.1000." in said
    assert re.search(r"Time of all attempts: [a-z]+ [\d.]+%, .*\.", said)
    lines = run(4, resume_from="latest")  # there is nothing left to do
    assert not [line for line in lines if "Trained" in line or "Best:" in line]


def test_an_interrupted_run_says_where_it_is_saved_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    interrupt = listener(
        on_train_step_end=lambda t, **_: os.kill(os.getpid(), signal.SIGINT) if t.progress.update == 2 else None
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        train(make_trainer(table(interrupt, SaveTrainingStateCallback("states"))))
    lines = printed(capsys)
    assert lines[0] == "Stopping because of SIGINT."
    said = notes_of_error(caught.value, " ".join(lines))
    assert said.index("Interrupted in epoch 1, after update 2, in") < said.index("The run is saved in")
    assert said.endswith('resume_from="latest".')


# ------------------------------------------------------------------------------------- where it is shown


def test_without_a_terminal_lines_and_the_summary_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    callbacks = [ProgressTableCallback, StepBasedEvaluationCallback(2), SaveBestModelCallback("best.pt")]
    trainer = train(make_trainer(callbacks), epochs=2, eval_dataset=True)
    trainer.evaluate()
    number, rate = r"[\d.e+-]+", r"[\d,]+"
    losses = trainer.run_history.get_metric_values("train_loss_epoch")
    times = rf"  time: {number}s, samples/s: {rate}, lr: 0\.1"
    expected = [
        "Starting training run",
        "Starting epoch 1/2",
        rf"  step: 2, intermediate_eval_loss: {number}",
        rf"  train_loss_epoch: {losses[0]:.6g}",
        rf"  eval_loss_epoch: {number}",
        times,
        "Starting epoch 2/2",
        rf"  step: 1, intermediate_eval_loss: {number}",
        rf"  step: 3, intermediate_eval_loss: {number}",
        rf"  train_loss_epoch: {losses[1]:.6g}",
        rf"  eval_loss_epoch: {number}",
        times,
        "Loading the best model: epoch 2, .*",
        rf"Trained 2 epochs, 6 updates, in {number}s \({rate} samples/s\)\.",
        rf"Best: epoch 2, eval loss {number}\.",
        "  best model: best.pt",
        "Starting evaluation run",
        rf"Evaluated in {number}s: evaluation_loss {number}",
    ]
    for line, pattern in zip(printed(capsys), expected, strict=True):
        assert re.fullmatch(pattern, line)


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


def test_the_speed_of_an_epoch_leaves_out_its_evaluations(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def spend(trainer: Trainer, **kwargs: Any) -> None:
        now[0] += 100 if kwargs.get("batch") is None else 0.5

    trainer = make_trainer([ProgressTableCallback, listener(on_train_step_end=spend, on_eval_step_start=spend)])
    train(trainer, eval_dataset=True, evaluate_every="1 updates")
    assert "samples/s: 4," in capsys.readouterr().out


def test_a_stopped_epoch_shows_its_times_and_its_last_rate(capsys):
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda update: 0.5**update)
    trainer = make_trainer([ProgressTableCallback, raises_at(5, StopTrainingError("enough"))])
    train(trainer, epochs=3, create_scheduler_fn=schedule)
    lines = printed(capsys)
    times = [line for line in lines if line.startswith("  time: ")]
    assert [line.rpartition("lr: ")[2] for line in times] == [f"{0.1 * 0.5**update:.6g}" for update in (2, 4)]
    assert lines.index(times[1]) == lines.index("Starting epoch 2/3") + 2
    seconds, speed = re.search(r"in ([\d.]+)s \(([\d,]+) samples/s\)", " ".join(lines)).groups()
    assert abs(float(seconds) - trainer.progress.samples / int(speed.replace(",", ""))) < 0.011  # of the same time


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_failed_run_shows_all_epochs_but_the_unfinished_one(error, always, capsys):
    def fail(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == 2:
            raise error

    shown = [ProgressTableCallback(show_always=always)]
    for failing, name in [(raises_at(4, error), "train_loss_epoch"), (listener(on_eval_epoch_end=fail), "")]:
        trainer = make_trainer([*shown, failing])
        with pytest.raises(type(error)):
            train(trainer, epochs=3, eval_dataset=True)
        *_, last, summary, best = printed(capsys)
        assert "in epoch 2, after update" in summary
        assert best.startswith("Best: epoch ")
        losses = trainer.run_history.get_metric_values("train_loss_epoch")
        assert len(losses) == 2  # that of the unfinished epoch is in the history
        if always:
            continue
        assert last == "Starting epoch 2/3" if name else last.startswith("  eval_loss_epoch: ")


def test_printing_in_a_terminal_does_not_break_the_table(monkeypatch):
    terminal = Terminal(80, monkeypatch)

    def disturb(trainer: Trainer, step: int, **kwargs: Any) -> None:
        bar = next(callback for callback in trainer.callback_handler if isinstance(callback, ProgressBarCallback)).pbar
        bar.refresh()
        if (trainer.progress.epoch, step) == (1, 1):
            print("mine: ", end="")
            print("whole")
            print("\nthis is half a line", end="")
            sys.stderr.write("logged\n")

    with terminal.streams():
        train(make_trainer([*DEFAULT_CALLBACKS, listener(on_train_step_end=disturb)]), epochs=3, eval_dataset=True)
    shown = terminal.shown
    body = [row[0] for row in rows(shown)]
    assert body == ["1/3", "2/3", "3/3"]
    assert not [line for line in shown if "|" in line]  # no bar is left
    for line in ("mine: whole", "logged", "this is half a line"):
        assert line in shown
    bars = [bar for bar in re.split(r"[\r\n]|\x1b\[\d*\w", terminal.written) if bar.startswith("Epoch")]
    assert max(len(bar.rstrip()) for bar in bars) <= 80
    assert not [bar for bar in bars if bar.rstrip().endswith(",")]
    assert any("loss=" in bar and "ETA=" in bar and "samples/s=" in bar for bar in bars)
    summary = next(number for number, line in enumerate(shown) if line.startswith("Trained 3 epochs, 9 updates"))
    assert max(map(len, shown[summary:])) <= 80  # it is wrapped


@pytest.mark.parametrize("always", [True, False])
def test_prints_at_the_end_of_an_epoch_are_below_its_row(always, capsys):
    def say(trainer: Trainer, **kwargs: Any) -> None:
        print("mine", trainer.progress.epoch)
        print("at once", end="\n", flush=trainer.progress.epoch == 2)
        if trainer.progress.epoch == 3:
            raise ValueError("on purpose")

    before = sys.stdout
    trainer = make_trainer([ProgressTableCallback(show_always=always), listener(on_training_run_epoch_end=say)])
    with pytest.raises(ValueError, match="on purpose"):
        train(trainer, epochs=3, eval_dataset=True)
    assert sys.stdout is before
    shown = [line for line in printed(capsys) if re.match(r"mine|at once|\d/3| +time: ", line)]
    row = r"\d/3 .*" if always else " +time: .*"
    for line, expected in zip(
        shown, [row, "mine 1", "at once", "mine 2", "at once", row, *([row] * always), "mine 3", "at once"], strict=True
    ):
        assert re.fullmatch(expected, line), shown


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
