"""Any names and texts of users are escaped in plots, files, output and messages."""

from __future__ import annotations

import csv
import json
from typing import Any
from xml.etree import ElementTree

import pytest

from pytorch_accel_lite import callbacks
from pytorch_accel_lite.base.display import escape_unprintable, format_metric
from pytorch_accel_lite.callbacks import LogMetricsCallback
from pytorch_accel_lite.utils import as_cell, from_cell
from tests.small_models import listener, make_trainer, train

NAMES = ["cost_$x^{$", "=1+1", "a|b", "<b>&", "two\nlines", "\x1b[2J", "\udcff", "x" * 300]


def record(trainer: Any, **kwargs: Any) -> None:
    for number, name in enumerate(NAMES):
        trainer.run_history.update_metric(name, number + trainer.progress.epoch)
    trainer.run_history.update_metric("note", "=cmd()\n\x1b[31m")


def run(*others: Any, epochs: int = 1) -> Any:
    return train(make_trainer([listener(on_train_epoch_end=record), *others]), epochs)


@pytest.mark.extension("plots")
def test_any_metric_name_can_be_plotted(tmp_path):
    run().run_history.plot(tmp_path / "metrics.svg")
    drawn = (tmp_path / "metrics.svg").read_text()
    assert "cost $x^{$" in drawn
    ElementTree.fromstring(drawn)


def test_any_metric_name_is_printed_on_one_line(capsys):
    run(LogMetricsCallback())
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\udcff" not in said
    assert not [line for line in said.splitlines() if line.startswith("lines")]


@pytest.mark.extension("metrics_file")
def test_tables_of_metrics_contain_no_formulas(tmp_path):
    run(*(callbacks.MetricsFileCallback(tmp_path / f"metrics.{suffix}") for suffix in ("csv", "jsonl")), epochs=2)
    head, *rows = csv.reader((tmp_path / "metrics.csv").read_text().splitlines())
    assert head[2:] == ["cost_$x^{$", "'=1+1", *map(escape_unprintable, NAMES[2:]), "note"]
    assert [row[-1] for row in rows] == [r"'=cmd()\n\x1b[31m"] * 2
    assert [float(row[3]) for row in rows] == [2, 3]
    exact = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["=1+1"] for row in exact] == [2, 3]
    assert list(exact[0])[2:] == [*NAMES, "note"]


@pytest.mark.extension("metrics_file")
def test_new_columns_keep_those_that_look_like_formulas(tmp_path):
    def add(trainer: Any, **kwargs: Any) -> None:
        trainer.run_history.update_metric(["=a", "-b"][trainer.progress.epoch - 1], -1.5)

    train(make_trainer([listener(on_train_epoch_end=add), callbacks.MetricsFileCallback(tmp_path / "m.csv")]), 2)
    head, *rows = csv.reader((tmp_path / "m.csv").read_text().splitlines())
    assert head[2:] == ["'=a", "'-b"]
    assert [row[2:] for row in rows] == [["-1.5", ""], ["", "-1.5"]]


@pytest.mark.parametrize(
    "text", ["=1", "+x", "-y", "@z", "'=1", "''@", "'", "-Infinity", "-1.5", "plain", "", 3.5, None]
)
def test_escaped_cells_are_read_back_unchanged(text):
    assert from_cell(as_cell(text)) == text


def test_texts_among_metrics_are_shown_in_a_line():
    assert format_metric("a\nb\x1b[0m é") == r"a\nb\x1b[0m é"


@pytest.mark.extension("trackers")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its database
@pytest.mark.xdist_group("mlflow")  # its import takes seconds
def test_mlflow_gets_names_that_it_accepts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it keeps files besides
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")  # leaves nothing to other tests
    tracker = callbacks.TrackerCallback("mlflow", project_dir=tmp_path, config={"=a": 1, "_a": 2})
    run(tracker)
    logged = mlflow.get_run(tracker.run_id).data
    assert logged.metrics["cost__x___"] == 1
    assert logged.metrics["_1_1"] == 2
    assert {logged.params["_a"], logged.params["_a_"]} == {"1", "2"}
