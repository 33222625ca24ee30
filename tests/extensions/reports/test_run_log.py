"""RunLogCallback: settings, progress and resuming in the folder of a run."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torchmetrics import R2Score

from pytorch_accel_lite import callbacks
from pytorch_accel_lite.callbacks import RunLogCallback, SaveTrainingStateCallback
from tests.ranks import shared_folder
from tests.small_models import adamw_trainer, float64_data, float64_model, listener, make_data, make_trainer, train


def test_the_folder_of_a_run_records_its_course(tmp_path):
    log = RunLogCallback(tmp_path / "log", {"idea": "wider <layers>"})
    train(make_trainer([log]), epochs=2, eval_dataset=True)
    record = json.loads((tmp_path / "log" / "run.json").read_text())
    assert record["attempts"][-1]["outcome"] == "finished"
    assert record["config"]["idea"] == "wider <layers>"
    assert record["config"]["num_epochs"] == 2
    assert record["versions"]["torch"]
    assert record["git"] is None or len(record["git"]["commit"]) == 40
    assert [row["epoch"] for row in record["metrics"]] == [1, 2]
    page = (tmp_path / "log" / "summary.html").read_text()
    assert page.count("<svg") == 1
    assert "wider &lt;layers&gt;" in page
    assert "http" not in page  # nothing is loaded when it is looked at
    text = (tmp_path / "log" / "summary.md").read_text()
    assert "- **Outcome**: finished" in text
    assert "| epoch | train_loss_epoch | eval_loss_epoch |" in text


@pytest.mark.extension("monitoring", "metrics")
def test_a_runs_page_starts_with_its_result(tmp_path):
    from pytorch_accel_lite.callbacks import MetricsCallback

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.01}, {"params": [model.bias]}], 0.1, momentum=0.5)
    metrics = MetricsCallback({"r2": R2Score()})
    states = SaveTrainingStateCallback(tmp_path / "states")
    log = RunLogCallback(tmp_path / "log", name="first <try>")
    rates = callbacks.LearningRateMonitorCallback()
    trainer = make_trainer([metrics, states, rates, log], model=model, optimizer=optimizer)
    train(trainer, epochs=3, eval_dataset=make_data(8), create_scheduler_fn=partial(StepLR, step_size=2))
    text = (tmp_path / "log" / "summary.md").read_text()
    best = max(trainer.run_history.get_metric_values("r2"))
    head, lead = text.splitlines()[:3:2]
    assert head == "# first &lt;try>"
    assert re.fullmatch(r"[\d.]+s · 3 of 3 epochs · 9 updates · [\d,]+ samples · started .* UTC", lead)
    assert re.search(rf"- \*\*r2\*\*: {best:.4f} \(best, epoch \d; final ", text)
    assert "- **Model**: Linear, 5 parameters\n" in text
    assert "- **Optimizer**: SGD(lr=0.01 to 0.1, momentum=0.5), 2 parameter groups\n" in text
    assert "- **Schedule**: StepLR(step_size=2)\n" in text
    assert f"The same command resumes the run from the newest training state in {tmp_path / 'states'}, with" in text
    command = re.search(r"```console\ncd (.*)\n(.*)\n```", text)
    assert shlex.split(command[1]) == [os.getcwd()]
    assert shlex.split(command[2]) == sys.orig_argv
    page = (tmp_path / "log" / "summary.html").read_text()
    assert "<h1>first &lt;try&gt;</h1>" in page
    assert page.count('class="number best"') == 2  # of the loss and of r2
    assert page.index("Curves") < page.index("<h2>Epochs") < page.index("<h2>What was run") < page.index("<h2>Command")


def command_to_repeat() -> list[str]:
    """The command that a record of the run shows, which was launched for CPUs."""
    with pytest.MonkeyPatch.context() as patch, shared_folder() as folder:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
        adamw_trainer(float64_model(), callbacks=[RunLogCallback(folder)]).train(float64_data(8), 1)
        command: list[str] = json.loads((folder / "run.json").read_text())["command"]
    return command


def test_a_repeated_command_keeps_its_number_of_cpu_processes(two_ranks):
    for command in two_ranks(command_to_repeat):
        how, program = command[:5], command[5:]
        assert how == ["ACCELERATE_USE_CPU=true", "torchrun", "--standalone", "--nproc_per_node", "2"]
        assert program == [argument for argument in sys.orig_argv[1:] if argument != "-u"]


@pytest.mark.parametrize(("folder", "name"), [("sine-run2/run_log", "sine-run2"), ("a/log", "a"), ("lr-0.1", "lr-0.1")])
def test_a_page_is_titled_by_the_folder_of_the_run(tmp_path, folder, name):
    train(make_trainer([RunLogCallback(tmp_path / folder)]), epochs=1)
    assert f"<title>{name}: finished</title>" in (tmp_path / folder / "summary.html").read_text()


def test_a_pipe_in_a_metric_name_does_not_split_its_column(tmp_path):
    named = listener(on_training_run_epoch_end=lambda trainer: trainer.run_history.update_metric("a|b", 1.0))
    train(make_trainer([named, RunLogCallback(tmp_path / "log")]), epochs=1)
    assert re.search(r"^\| epoch \| .*a\\\|b \|.*\n\|[- :|]+\n\| ", (tmp_path / "log" / "summary.md").read_text(), re.M)


def test_numbers_are_written_as_in_the_table_of_a_terminal(tmp_path):
    values = iter([(2.5, 1e-9, 31234.5, 7), (0.1234567, 0.002, 4.0, 1200), (math.nan, 0.0, 5.5, 3)])
    names = ("falling", "small", "large", "whole")
    record = listener(
        on_train_epoch_end=lambda t: [
            t.run_history.update_metric(*item) for item in zip(names, next(values), strict=True)
        ]
    )
    train(make_trainer([record, RunLogCallback(tmp_path)]), epochs=3)
    head, _, *rows = re.findall(r"^\|(.*)\|$", (tmp_path / "summary.md").read_text(), re.MULTILINE)[:5]
    columns = dict(
        zip(head.replace(" ", "").split("|"), zip(*[row.split("|") for row in rows], strict=True), strict=True)
    )
    assert {name: [cell.strip() for cell in columns[name]] for name in names} == {
        "falling": ["2.5000", "0.1235", "NaN"],
        "small": ["1.00e-09", "0.0020", "0.0000"],
        "large": ["31234.5000", "4.0000", "5.5000"],
        "whole": ["7", "1,200", "3"],
    }


def test_a_short_run_writes_its_page_at_its_beginning_and_end(tmp_path):
    files = []
    look = listener(on_train_epoch_start=lambda t: files.append((tmp_path / "summary.html").stat().st_ino))
    train(make_trainer([RunLogCallback(tmp_path), look]), epochs=4)
    assert len(set(files)) == 1
    assert (tmp_path / "summary.html").stat().st_ino not in files
    assert "cannot be resumed: it saves no training states" in (tmp_path / "summary.md").read_text()


def test_the_record_of_a_run_is_json_for_any_values_and_settings(tmp_path):
    def no_number(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    record = listener(on_train_epoch_end=lambda t: t.run_history.update_metric("mine", math.nan))
    config = {("a", 1): 2, "rates": (0.1, math.inf), "nested": {3: torch.tensor(4.0), "path": tmp_path}}
    train(make_trainer([record, RunLogCallback(tmp_path, config)]))
    found = json.loads((tmp_path / "run.json").read_text(), parse_constant=no_number)
    assert found["metrics"][0]["mine"] == "NaN"
    assert found["config"]["('a', 1)"] == 2
    assert found["config"]["rates"] == [0.1, "Infinity"]
    assert found["config"]["nested"] == {"3": 4.0, "path": str(tmp_path)}


OTHER = ["[]", "5", "{", '{"length": "x", "attempts": 5}', '{"attempts": [5]}', '{"attempts": [{}]}']


@pytest.mark.sampled
@pytest.mark.parametrize("content", OTHER)
def test_a_record_with_another_structure_is_replaced(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    train(make_trainer()).save_training_state(tmp_path / "state")
    with pytest.warns(UserWarning, match=r"run.json' does not hold the record of a run"):
        train(make_trainer([RunLogCallback(tmp_path)]), 2, resume_from=tmp_path / "state")


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("content", [None, "", "{}"])
def test_a_lost_or_damaged_record_restarts_when_resumed(tmp_path, content):
    def run(**kwargs: Any) -> list[Any]:
        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)
        train(make_trainer([RunLogCallback(tmp_path), saving], seed=0), **kwargs)
        return [a["from_update"] for a in json.loads((tmp_path / "run.json").read_text())["attempts"]]

    state = tmp_path / "states" / "update-000000002"
    assert run() == [0]
    assert run(resume_from=state) == [0, 2]
    (tmp_path / "run.json").unlink() if content is None else (tmp_path / "run.json").write_text(content)
    with pytest.warns(UserWarning, match="does not hold the record of a run") if content is not None else nullcontext():
        assert run(resume_from=state) == [2]


def test_an_error_is_recorded_in_the_run_folder(tmp_path):
    def fail(trainer: Any, **kwargs: Any) -> None:
        raise ValueError("nothing works")

    with pytest.raises(ValueError, match="nothing works"):
        train(make_trainer([RunLogCallback(tmp_path), listener(on_train_step_end=fail)]))
    attempt = json.loads((tmp_path / "run.json").read_text())["attempts"][-1]
    assert attempt["outcome"] == "failed: ValueError: nothing works"
    assert "in fail" in attempt["traceback"]
    assert "nothing works" in (tmp_path / "summary.html").read_text()


def test_without_matplotlib_the_page_has_tables(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    train(make_trainer([RunLogCallback(tmp_path)]))
    page = (tmp_path / "summary.html").read_text()
    assert "For curves: <code>pip install" in page
    assert "train_loss_epoch" in page


def test_each_of_several_optimizers_is_described(tmp_path):
    model = nn.Linear(4, 1)
    groups = [{"params": [model.bias], "lr": 0.02}]
    optimizers = {"matrix": torch.optim.SGD([model.weight], 0.05, momentum=0.9), "rest": torch.optim.AdamW(groups)}
    schedule = {"matrix": partial(ExponentialLR, gamma=0.2)}
    train(make_trainer([RunLogCallback(tmp_path)], model, optimizer=optimizers), create_scheduler_fn=schedule)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["optimizer"] == "matrix: SGD(lr=0.05, momentum=0.9); rest: AdamW(lr=0.02)"
    assert record["schedule"] == "matrix: ExponentialLR(gamma=0.2)"


@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_an_optimizer_without_a_rate_is_described(defaults, tmp_path):
    class FindsItsOwn(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, defaults)

        def step(self, closure: Any = None) -> None:
            pass

    model = nn.Linear(4, 1)
    train(make_trainer([RunLogCallback(tmp_path)], model, optimizer=FindsItsOwn(model.parameters())))
    assert json.loads((tmp_path / "run.json").read_text())["optimizer"] == "FindsItsOwn()"


def test_the_record_and_the_page_say_how_the_time_was_spent(tmp_path):
    trainer = train(make_trainer([RunLogCallback(tmp_path)]))
    trainer.evaluate(make_data())  # writes them again, where the time of the run is known
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["goodput"]["seconds"] == pytest.approx(trainer.goodput.seconds)
    assert f"**Time**: {trainer.goodput}" in (tmp_path / "summary.md").read_text()
