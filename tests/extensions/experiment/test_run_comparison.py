"""Comparing runs by their files, from experiments and from scripts."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics import R2Score

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite import Trainer, callbacks, compare_runs
from pytorch_accel_lite.callbacks import MetricsFileCallback, SaveTrainingStateCallback
from pytorch_accel_lite.experiment import Experiment, RunComparison
from pytorch_accel_lite.extensions.experiment.command_line import main
from tests.extensions.experiment import parts
from tests.extensions.experiment.small_experiment import FILE, SCHEDULE
from tests.small_models import listener, make_data, make_trainer

METRICS = """
callbacks:
  - class_path: MetricsCallback
    init_args:
      metrics:
        r2: {class_path: torchmetrics.R2Score}
"""
OBSERVERS = ["PrintProgressCallback", "LearningRateMonitorCallback", "LogMetricsCallback"]  # which change nothing
OF_FILES = {
    "adam-2": {},
    "adam-10": {"model.width": 7, "optimizer.lr": 0.1, "callbacks+": OBSERVERS},
    "sgd": {"optimizer": "SGD", "optimizer.momentum": 0.5, "scheduler": None},
}


def train(folder: Path, seed: int, *others, **kwargs) -> Trainer:
    from pytorch_accel_lite.callbacks import MetricsCallback

    torch.manual_seed(seed)
    model = parts.Net()
    metrics = MetricsCallback({"r2": R2Score()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [metrics, *others], seed=seed)
    trainer.train(parts.load_data(16), 2, parts.load_data(8), **kwargs)
    return trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Trainer]:
    """Trainers by the folders of their runs: three from files, one each with a record and with states; and others."""
    folder = tmp_path_factory.mktemp("compared") / "runs"
    folder.mkdir()
    (folder / "small.yaml").write_text(FILE + METRICS)
    found = {}
    for name, overrides in OF_FILES.items():
        overrides = overrides | {"output_dir": str(folder / name)}
        found[str(folder / name)] = Experiment.from_file(folder / "small.yaml", overrides).train()
    script, states = folder / "script", folder / "states"
    log = callbacks.RunLogCallback(script / "log", {"idea": "<wider>"})
    found[str(script)] = train(script, 1, callbacks.LearningRateMonitorCallback(), log)
    rows = MetricsFileCallback(states / "metrics.csv", every_n_updates=1)
    found[str(states)] = train(states, 2, rows, SaveTrainingStateCallback(states / "kept"))
    (folder / "empty").mkdir()
    return found


@pytest.fixture
def comparison(runs) -> RunComparison:
    return compare_runs(runs)


@pytest.mark.extension("monitoring", "reports", "metrics")
def test_each_run_is_found_with_its_best_metrics(runs, comparison):
    assert [run.name for run in comparison.runs] == ["adam-2", "adam-10", "sgd", "script", "states"]
    assert list(map(str, comparison.metrics)) == ["eval_loss_epoch (min)", "r2 (max)", "train_loss_epoch (last)"]
    for row, trainer in zip(comparison.rows(), runs.values(), strict=True):
        history = trainer.run_history
        assert row["epochs"] == 2
        assert row["eval_loss_epoch"] == min(history["eval_loss_epoch"])
        assert row["r2"] == pytest.approx(max(map(float, history["r2"])))
        assert row["train_loss_epoch"] == history["train_loss_epoch"][-1]
    table = comparison.to_dataframe()
    assert table.loc["adam-10", "optimizer.lr"] == 0.1


@pytest.mark.slow
@pytest.mark.extension("monitoring", "reports")
def test_derived_settings_are_not_listed_as_differences(runs):
    from_files = compare_runs(list(runs)[:3])
    assert from_files.differences == [
        "model.width",
        "optimizer",
        "optimizer.lr",
        "optimizer.weight_decay",
    ]  # no momentum
    assert [run.settings["model.width"] for run in from_files.runs] == [5, 7, 5]
    from_scripts = compare_runs(list(runs)[3:])
    assert from_scripts.differences == []  # one of them has left none
    assert not {"num_epochs", "idea"} & {*compare_runs(runs).differences}
    script, _ = from_scripts.runs
    assert (script.settings["idea"], script.outcome) == ("<wider>", "finished")
    assert script.settings["optimizer"] == "SGD(lr=0.05)"
    assert compare_runs(next(iter(runs))).differences == []


@pytest.mark.extension("monitoring", "reports", "metrics")
def test_a_table_fits_a_terminal_and_marks_the_best(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = compare_runs(list(runs)[:3])
    lines = repr(found).splitlines()
    assert max(map(len, lines)) <= 80
    values = {row["run"]: row["r2"] for row in found.rows()}
    marked = {line.split()[0] for line in lines if re.search(rf"{max(values.values()):.4f}\*", line)}
    assert marked == {max(values, key=values.__getitem__)}
    assert "Settings that differ" in lines
    assert re.search(r"^sgd +5 +SGD +0.01 +0$", "\n".join(lines), re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.extension("monitoring", "reports")
def test_the_page_has_the_curves_of_all_runs_and_loads_nothing(comparison, tmp_path):
    page = comparison.save(tmp_path / "pages" / "comparison.html").read_text()
    curves = re.findall(r"<figure>(.*?)</figure>", page, re.DOTALL)
    assert len(curves) == 3
    assert all(re.findall(r'<g class="run-(\d)">', curve) == ["4", "3", "2", "1", "0"] for curve in curves)
    assert page.count('class="number best"') == 2
    assert "&lt;wider&gt;" in page
    assert "<wider>" not in page
    assert not re.search(r"(src|href)=\"http|url\(http|@import", page)
    assert "<summary>Settings that do not differ</summary>" in page


@pytest.mark.slow
@pytest.mark.extension("monitoring", "reports")
def test_runs_are_sorted_by_a_metric(runs):
    by_metric = [row["r2"] for row in compare_runs(runs, sort_by="r2").rows()]
    assert by_metric == sorted(by_metric, reverse=True)
    by_loss = [row["r2"] for row in compare_runs(runs, sort_by="r2", directions={"r2": False}).rows()]
    assert by_loss == sorted(by_loss)
    with pytest.raises(ValueError, match=r"sort_by='r22' must be a metric .* Did you mean 'r2'\?"):
        compare_runs(runs, sort_by="r22")


@pytest.mark.thorough
@pytest.mark.extension("monitoring", "reports", "metrics")
def test_the_command_compares_a_folder_of_runs(runs, capsys, monkeypatch):
    folder = Path(next(iter(runs))).parent
    monkeypatch.chdir(folder.parent)
    assert main(["compare", *sorted(map(str, folder.iterdir())), "--sort", "r2"]) == 0
    printed = capsys.readouterr().out
    assert f"The page with the curves is {os.path.join('runs', 'comparison.html')}" in printed
    assert printed.startswith("5 runs")
    assert f"Left out, without metrics: {folder / 'empty'}" in printed
    assert (folder / "comparison.html").stat().st_size > 10_000
    (folder / "comparison.html").unlink()
    assert main(["compare", "runs", "--page", "other.html", "--minimize", "r2"]) == 0
    assert "r2 (min)" in capsys.readouterr().out
    assert (folder.parent / "other.html").is_file()


def test_many_runs_and_non_finite_values_are_compared(tmp_path):
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        rows = [{"epoch": epoch, "eval_loss_epoch": 1 / epoch + number, "share": epoch / 4} for epoch in (1, 2)]
        if number == 0:
            rows[-1] |= {"eval_loss_epoch": "NaN", "share": "NaN"}
        (tmp_path / str(number) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare_runs(tmp_path)
    assert [run.name for run in found.runs] == list(map(str, range(20)))
    assert found.rows()[0] == {"run": "0", "epochs": 2, "eval_loss_epoch": 1.0, "share": None}
    assert math.isnan(found.runs[0].metrics["share"][1][-1])
    assert list(map(str, found.metrics)) == ["eval_loss_epoch (min)", "share (last)"]
    assert compare_runs(tmp_path, sort_by="share", directions={"share": True}).runs[-1].name == "0"
    with pytest.raises(ValueError, match=r"sort_by='share' must be a metric .* --maximize share or --minimize"):
        compare_runs(tmp_path, sort_by="share")
    with pytest.raises(ValueError, match=r"directions has 'shar' .* no run has such a metric\. Did you mean 'share'\?"):
        compare_runs(tmp_path, directions={"shar": True})
    with pytest.raises(TypeError, match=r"directions\['share'\]='min' must be True or False, not str"):
        compare_runs(tmp_path, directions={"share": "min"})
    with pytest.raises(ValueError, match="No runs found in an empty list"):
        compare_runs(tmp_path.glob("nowhere/*"))
    assert "Settings that differ" not in repr(found)
    page = found.save(tmp_path / "page.html").read_text()
    assert page.count('stroke-dasharray="6 3"') == 7
    assert page.count('stroke-dasharray="2 3"') == 6


@pytest.mark.extension("metrics")
def test_runs_with_a_metric_called_update_are_found(tmp_path):
    folder = tmp_path / "run"
    record = listener(on_train_epoch_end=lambda trainer, **_: trainer.run_history.update_metric("update", 7.0))
    train(folder, 0, record, MetricsFileCallback(folder / "metrics.jsonl", every_n_updates=1))
    [row] = compare_runs([folder]).rows()
    assert row["update"] == 7.0


def test_a_metric_named_like_a_column_hides_no_values(tmp_path):
    for number in (1, 2):
        run = tmp_path / f"{number}"
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"epoch": 1, "epochs": 40.0, "share": 0.5}\n')
        (run / "run.json").write_text(json.dumps({"config": {"share": number}}))
    assert compare_runs(tmp_path).rows()[1] == {
        "run": "2",
        "epochs": 1,
        "share": 2,
        "epochs (last)": 40,
        "share (last)": 0.5,
    }


@pytest.mark.extension("common_mistakes")
def test_an_unused_learning_rate_does_not_count_as_a_difference(tmp_path, capsys):
    (tmp_path / "small.yaml").write_text(FILE + SCHEDULE)
    for name, rate in {"default": 1e-3, "other": 3e-4, "same": 0.01}.items():
        arguments = ["--optimizer.lr", str(rate), "--output_dir", str(tmp_path / name)]
        assert main(["train", str(tmp_path / "small.yaml"), *arguments]) == 0
        assert (f"{rate:g} has no effect: OneCycleLR sets rates of its own" in capsys.readouterr().out) == (rate < 0.01)
    found = compare_runs(tmp_path)
    assert found.differences == []
    assert repr(found).endswith("optimizer.lr differs, too, but has no effect: the scheduler sets rates of its own.")


@pytest.mark.extension("reports", "named_schedules", "metrics")
def test_schedules_differ_in_their_arguments(tmp_path):
    for name in ("linear", "cosine"):
        train(tmp_path, 0, callbacks.RunLogCallback(tmp_path / name), create_scheduler_fn=name)
    found = compare_runs(tmp_path)
    assert found.differences == ["schedule"]
    assert [row["schedule"] for row in found.rows()] == [
        f"WSDLrScheduler(total_steps=4, decay_phase_ratio=1, lr_min=0, decay={name})" for name in ("cosine", "linear")
    ]


def test_classes_and_files_are_shown_by_name(tmp_path):
    for name in ("small", "large"):
        run = tmp_path / name
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"epoch": 1, "eval_loss_epoch": 1.0}\n')
        data = f"{{class_path: my_module.load_{name}, init_args: {{path: {name}.csv}}}}"
        (run / "experiment.yaml").write_text(f"data: {{train: {data}}}\n")
    shown = repr(compare_runs(tmp_path))
    assert re.search(r"^small +load_small +small\.csv$", shown, re.MULTILINE)
    assert re.search(r"^large +load_large +large\.csv$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda folder: None, ValueError, "No runs found in .*: there are no metrics. They are in the metrics.jsonl"),
        (lambda folder: (folder / "metrics.jsonl").touch(), ValueError, "No runs found in "),
        (lambda folder: folder.rmdir(), FileNotFoundError, "There is no '.*run'"),
        (lambda folder: (folder / "metrics.jsonl").write_text("{}\n{"), ValueError, "metrics.jsonl, line 2 is no row"),
        (
            lambda folder: (folder / "metrics.jsonl").write_text('{"epoch": NaN}'),
            ValueError,
            "metrics.jsonl is damaged",
        ),
        (lambda folder: (folder / "metrics.jsonl").write_bytes(b"\xff"), ValueError, "metrics.jsonl is not a text"),
        (lambda folder: (folder / "metrics.csv").write_text("a,b\n1,2,3"), ValueError, "No runs found in "),
        (lambda folder: (folder / "metrics.csv").write_text("epoch\nx"), ValueError, "the epoch of a row is 'x'"),
        (lambda folder: (folder / "run.json").write_text("{"), ValueError, "run.json is not JSON"),
    ],
)
def test_runs_that_cannot_be_compared_are_an_error(write, error, message, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder)
    with pytest.raises(error, match=message):
        compare_runs(folder)
    assert main(["compare", str(folder)]) == 2
    assert re.search(f"^error: .*{message}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[]", "No runs found in .*: there are no metrics")]
    + [
        (f'{{"{key}": {value}}}', rf"run\.json is not the record of a run: '{key}' in it is '{re.escape(value)}'")
        for key, value in (("metrics", "5"), ("metrics", "[1]"), ("attempts", "[1]"), ("config", "[]"))
    ],
)
def test_a_record_that_cannot_be_compared_is_named(tmp_path, content, message):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        compare_runs(tmp_path)


def test_names_that_look_like_formulas_are_compared_as_they_are(tmp_path):
    named = listener(on_train_epoch_end=lambda trainer, **kwargs: trainer.run_history.update_metric("=1+1", 3))
    make_trainer([named, MetricsFileCallback(tmp_path / "metrics.jsonl")]).train(make_data(), 2)
    (compared,) = compare_runs(tmp_path).runs
    assert compared.rows[1]["=1+1"] == 3


@pytest.mark.parametrize("file", ["metrics.csv", "metrics.jsonl"])
def test_boolean_metrics_are_numbers_in_each_kind_of_file(tmp_path, file):
    say = listener(on_train_epoch_end=lambda trainer: trainer.run_history.update_metric("flag", True))
    make_trainer([say, MetricsFileCallback(tmp_path / "run" / file)]).train(make_data(), 2)
    (run,) = compare_runs(tmp_path).runs
    assert [row["flag"] for row in run.rows] == [1.0, 1.0]
