"""MetricsFileCallback: its rows and values, and files of other programs that it does not touch."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from typing import Any

import pytest

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import MetricsFileCallback, SaveTrainingStateCallback
from tests.logs import csv_rows, json_rows
from tests.small_models import listener, make_data, make_trainer, train


def test_values_outside_json_and_csv_are_written_as_text(tmp_path):
    odd = {"nan": math.nan, "inf": -math.inf, "words": "two words", "list": [1, 2]}

    def record(trainer: Any) -> None:
        for name, value in odd.items():
            trainer.run_history.update_metric(name, value)

    files = [MetricsFileCallback(tmp_path / name) for name in ("m.jsonl", "m.csv")]
    train(make_trainer([listener(on_train_epoch_end=record), *files]))
    expected = {"nan": "NaN", "inf": "-Infinity", "words": "two words", "list": "[1, 2]"}
    assert json_rows(tmp_path / "m.jsonl")[0].items() >= expected.items()
    assert csv_rows(tmp_path / "m.csv")[0].items() >= expected.items()


def test_a_metric_called_epoch_is_left_out_of_tables_and_files(tmp_path):
    record = listener(on_train_epoch_end=lambda trainer, **_: trainer.run_history.update_metric("epoch", 0.5))
    trainer = make_trainer([record, MetricsFileCallback(tmp_path / "m.jsonl")])
    with pytest.warns(UserWarning, match="The metric 'epoch' is left out"):
        train(trainer, 2)
    assert trainer.run_history.get_metric_values("epoch") == [0.5, 0.5]
    assert [json.loads(line)["epoch"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2]
    assert [row["epoch"] for row in trainer.run_history.rows()] == [1, 2]
    assert list(trainer.run_history.to_dataframe().index) == [1, 2]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_row_is_appended_and_the_file_has_the_whole_history(tmp_path, suffix):
    path = tmp_path / f"m.{suffix}"
    files: list[int] = []

    def change(trainer: Any) -> None:
        if trainer.progress.epoch == 3:
            trainer.evaluate(make_data())  # writes a row, to which the epoch then adds

    def look(trainer: Any) -> None:
        files.append(path.stat().st_ino)
        read = csv_rows(path) if suffix == "csv" else json_rows(path)
        written = [{name: str(value) for name, value in row.items() if value != ""} for row in read]
        assert written == [{name: str(v) for name, v in row.items()} for row in trainer.run_history.rows()]

    callbacks = [listener(on_train_epoch_end=change), MetricsFileCallback(path), listener(on_epoch_checkpoint=look)]
    train(make_trainer(callbacks), epochs=5, eval_dataset=True)
    first, _, *later = [file != before for before, file in pairwise(files)]
    assert not any([first, *later])


def test_an_evaluation_after_the_run_is_in_its_last_epochs_row(tmp_path):
    trainer = train(make_trainer([MetricsFileCallback(tmp_path / "m.jsonl")]), epochs=2)
    loss = trainer.evaluate(make_data())["evaluation_loss"]
    rows = json_rows(tmp_path / "m.jsonl")
    assert [row.get("evaluation_loss") for row in rows] == [None, loss]


def test_an_evaluation_alone_leaves_the_file_of_an_earlier_run(tmp_path):
    train(make_trainer([MetricsFileCallback(tmp_path / "m.jsonl")]))
    before = (tmp_path / "m.jsonl").read_text()
    make_trainer([MetricsFileCallback(tmp_path / "m.jsonl")]).evaluate(make_data())
    assert (tmp_path / "m.jsonl").read_text() == before


def test_columns_may_be_added_later(tmp_path):
    def measure(trainer: Any) -> None:
        if trainer.progress.update >= 1:
            trainer.step_metrics["late"] = trainer.progress.update

    files = [MetricsFileCallback(tmp_path / name, 1) for name in ("m.jsonl", "m.csv")]
    train(make_trainer([listener(on_optimizer_step_start=measure), *files]), epochs=2, eval_dataset=True)
    assert [row["late"] for row in csv_rows(tmp_path / "m_updates.csv")] == ["", "1.0", "2.0", "3.0", "4.0", "5.0"]
    assert [row.get("late") for row in json_rows(tmp_path / "m_updates.jsonl")] == [None, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_resumed_run_continues_a_column_of_any_name(tmp_path, suffix):
    def measure(trainer: Any) -> None:
        trainer.step_metrics["of the\n=class"] = trainer.progress.update

    for epochs in (1, 2):
        file = MetricsFileCallback(tmp_path / f"m.{suffix}", 1)
        saving = SaveTrainingStateCallback(tmp_path / "states")
        callbacks = [listener(on_optimizer_step_start=measure), file, saving]
        train(make_trainer(callbacks, seed=0), epochs, resume_from="latest")
    rows = (csv_rows if suffix == "csv" else json_rows)(tmp_path / f"m_updates.{suffix}")
    assert all(len(row) == 4 for row in rows)
    assert [float([*row.values()][-1]) for row in rows] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_metrics_file_of_another_program_is_refused(reverse, here):
    callbacks = [MetricsFileCallback("m.jsonl", every_n_updates=2), MetricsFileCallback(here / "m_updates.jsonl")]
    with pytest.raises(ValueError, match=r"path='.*m_updates.jsonl' is used by two callbacks, Metrics.* and Metrics"):
        train(make_trainer(callbacks[:: -1 if reverse else 1]))
    assert not list(here.iterdir())


def test_rows_are_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("mine")

    def plant(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == 3:
            (tmp_path / "m.jsonl").unlink()
            (tmp_path / "m.jsonl").symlink_to(tmp_path / "precious")

    callbacks = [listener(on_train_epoch_end=plant), MetricsFileCallback(tmp_path / "m.jsonl")]
    with pytest.raises(OSError, match=r"Links are not followed here. Remove this one: .*m\.jsonl'"):
        train(make_trainer(callbacks), 3)
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_failed_run_releases_its_outputs(tmp_path):
    class Fails(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            raise ArithmeticError

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            train(make_trainer([MetricsFileCallback(tmp_path / "m.jsonl"), Fails()]))
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_a_second_run_adds_to_the_file_of_the_first(tmp_path):
    trainer = train(make_trainer([MetricsFileCallback(tmp_path / "m.jsonl")]), epochs=2)
    train(trainer, epochs=2, reset_run_history=False)
    assert [row["epoch"] for row in json_rows(tmp_path / "m.jsonl")] == [1, 2, 3, 4]


def test_a_resumed_run_may_write_to_another_file(tmp_path, capsys):
    saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
    train(make_trainer([MetricsFileCallback(tmp_path / "a.jsonl"), saving], seed=0))
    capsys.readouterr()
    other = MetricsFileCallback(tmp_path / "b.jsonl", every="1 updates")
    train(make_trainer([other, saving], seed=0), 2, resume_from=tmp_path / "update-000000003")
    assert "Changed" not in capsys.readouterr().out
    assert [row["epoch"] for row in json_rows(tmp_path / "b.jsonl")] == [1, 2]
    assert [row["update"] for row in json_rows(tmp_path / "b_updates.jsonl")] == [4, 5, 6]


def test_an_unwritable_folder_is_an_error_before_training(tmp_path):
    (tmp_path / "file").touch()
    steps: list[int] = []
    look = listener(on_train_step_start=lambda t: steps.append(1))
    with pytest.raises((OSError, ValueError), match=r"(?i)not a (folder|directory)"):
        train(make_trainer([MetricsFileCallback(tmp_path / "file" / "metrics.jsonl"), look]))
    assert not steps


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MetricsFileCallback("metrics.txt"), r"path='metrics.txt' must end in .jsonl"),
        (lambda: MetricsFileCallback(every_n_updates=0), "every_n_updates=0 must be at least 1"),
        (lambda: MetricsFileCallback(every="often"), "^every='often' must be"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
