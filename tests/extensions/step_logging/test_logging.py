"""Logged values are written once to files, trackers and run folders, also after kills and on several processes."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.extensions.step_logging import StepLogger
from tests.launching import PATIENCE, SOAK, EarlyFork, some_of
from tests.logs import csv_rows, json_rows, scalars
from tests.scripts.logged import EPOCHS, UPDATES, run, run_with_mlflow
from tests.small_models import listener, make_trainer, train

#: Has every logger.
OF_THE_SCRIPT = pytest.mark.extension("metrics_file", "monitoring", "reports", "trackers")


class Rows(StepLogger):
    """Keeps its rows."""

    def __init__(self, every_n_updates: int = 1) -> None:
        super().__init__(every_n_updates)
        self.rows: list[dict[str, Any]] = []

    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        self.rows.append({"update": update, "epoch": epoch, **values})


def mlflow_metrics(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What the file store of MLflow holds; each line is a time, a value and a step."""
    found = {}
    for path in folder.glob("mlruns/*/*/metrics/*"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[path.name] = [(int(step), float(value)) for _, value, step in lines]
    return found


def whole(folder: Path) -> dict[str, Any]:
    """Everything that a run has logged, for comparing."""
    return {
        "epochs": json_rows(folder / "metrics.jsonl"),
        "updates": json_rows(folder / "metrics_updates.jsonl"),
        "csv": csv_rows(folder / "metrics.csv"),
        "csv updates": csv_rows(folder / "metrics_updates.csv"),
        "tensorboard": scalars(folder / "tensorboard" / "run"),
        "mlflow": mlflow_metrics(folder),
        "page": json.loads((folder / "log" / "run.json").read_text())["metrics"],
        "texts": json.loads((folder / "log" / "run.json").read_text())["outputs"],
        "texts in mlflow": {path.name: path.read_text() for path in folder.glob("mlruns/*/*/artifacts/*.txt")},
    }


@pytest.fixture(scope="module")
def uninterrupted_logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logged")
    for tracker in ("mlflow", "torch.utils.tensorboard"):
        EarlyFork.copy.ask(tracker)  # so that no fork imports it again
    process = EarlyFork(partial(run_with_mlflow, folder), folder / "output")
    assert process.wait() == 0, (folder / "output").read_text()
    return folder


@OF_THE_SCRIPT
def test_every_logger_has_every_row_once(uninterrupted_logs):
    logged = whole(uninterrupted_logs)
    assert [row["epoch"] for row in logged["epochs"]] == [1, 2, 3]
    assert {"train_loss_epoch", "eval_loss_epoch", "lr", "gradient_norm_max"} <= logged["epochs"][0].keys()
    assert [(row["update"], row["epoch"]) for row in logged["updates"]] == [(u, (u - 1) // 4 + 1) for u in range(1, 13)]
    assert [row["epoch"] for row in logged["csv"]] == ["1", "2", "3"]
    assert [row["update"] for row in logged["csv updates"]] == ["3", "6", "9", "12"]
    assert logged["page"] == logged["epochs"]
    tensorboard, mlflow = logged["tensorboard"], logged["mlflow"]
    assert [step for step, _ in tensorboard["loss"]] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in tensorboard["eval_loss_epoch"]] == [4, 8, 12]
    assert [step for step, _ in tensorboard["lr"]] == [2, 4, 6, 8, 10, 12]
    for curves in (tensorboard, mlflow):
        assert [step for step, _ in curves["intermediate_eval_loss"]] == [2, 4, 6, 8, 10, 12]
    evaluated = [value for _, value in mlflow["intermediate_eval_loss"]]
    assert evaluated[1::2] == [value for _, value in mlflow["eval_loss_epoch"]]  # of the same weights
    assert [step for step, _ in mlflow["loss"]] == list(range(1, 13))
    assert [value for _, value in mlflow["loss"]] == [row["loss"] for row in logged["updates"]]
    assert [value for _, value in mlflow["train_loss_epoch"]] == [row["train_loss_epoch"] for row in logged["epochs"]]
    weights = {shown["update"]: shown["texts"]["a weight"] for shown in logged["texts"]}
    assert list(weights) == [3, 6, 9, 12]
    assert logged["texts in mlflow"] == {f"a_weight-{update:09d}.txt": text for update, text in weights.items()}
    (params,) = uninterrupted_logs.glob("mlruns/*/*/params/num_epochs")
    assert params.read_text() == "3"


@OF_THE_SCRIPT
def test_the_losses_of_rows_are_means_since_the_row_before(uninterrupted_logs):
    logged = whole(uninterrupted_logs)
    losses = [row["loss"] for row in logged["updates"]]
    for number, row in enumerate(logged["epochs"]):
        of_epoch = losses[4 * number : 4 * number + 4]
        assert row["train_loss_epoch"] == pytest.approx(sum(of_epoch) / 4)
    by_twos = [sum(losses[i : i + 2]) / 2 for i in range(0, 12, 2)]
    assert [value for _, value in logged["tensorboard"]["loss"]] == pytest.approx(by_twos, rel=1e-6)


def is_killed(begin: Callable[[], EarlyFork], folder: Path, delay: float) -> bool:
    """Kill a run some time after it has written its page, and a state; return whether it was still alive."""
    page = folder / "log" / "run.json"
    before = page.stat().st_mtime_ns if page.exists() else 0
    process, deadline = begin(), time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        has_written = page.exists() and page.stat().st_mtime_ns != before
        if has_written and list(folder.glob("states/update-*")):
            break
        time.sleep(0.005)
    time.sleep(delay)
    was_alive = process.poll() is None
    process.kill()
    assert process.wait() != 0, "the run had ended"
    return was_alive


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.programs
@pytest.mark.parametrize("saver_first", some_of([False, True]))
@OF_THE_SCRIPT
def test_a_run_killed_again_and_again_logs_the_same(uninterrupted_logs, tmp_path, saver_first):
    """SIGKILL at random times after a start; ``make soak`` for more of them."""

    def begin(is_to_end=False):
        again = partial(run_with_mlflow, tmp_path, saver_first, delay=0.05, is_to_end=is_to_end)
        return EarlyFork(again, tmp_path / "output")

    chance, longest = random.Random(5), 0.1 if SOAK else 0.25
    kills, wanted = 0, 20 if SOAK else 2
    while kills < wanted:
        kills += is_killed(begin, tmp_path, chance.random() * longest)
    assert begin(is_to_end=True).wait() == 0
    logged, expected = whole(tmp_path), whole(uninterrupted_logs)
    for name in ("epochs", "updates", "csv", "csv updates", "page", "tensorboard"):
        assert logged[name] == expected[name], name
    runs = Counter(path.parent.parent for path in tmp_path.glob("mlruns/*/*/metrics/loss"))
    assert len(runs) == 1
    assert logged["mlflow"] == expected["mlflow"]
    attempts = json.loads((tmp_path / "log" / "run.json").read_text())["attempts"]
    assert attempts[-1]["outcome"] == "finished"


@pytest.mark.thorough
@pytest.mark.processes
@OF_THE_SCRIPT
def test_one_of_two_processes_writes_the_numbers_of_both(tmp_path, uninterrupted_logs, job):
    assert job(2).run(run_with_mlflow, tmp_path) == [2, 2]
    logged, expected = whole(tmp_path), whole(uninterrupted_logs)
    for row, other in zip(logged["updates"], expected["updates"], strict=True):
        assert row == pytest.approx(other)
    assert logged["tensorboard"].keys() == expected["tensorboard"].keys()
    assert len(list(tmp_path.glob("tensorboard/run/events*"))) == 1
    assert len(logged["mlflow"]["loss"]) == UPDATES


# ------------------------------------------------------------------------------------------------- rows


def with_step_metrics(**metrics: Any) -> list[dict[str, Any]]:
    """The rows of a run in which these step metrics were put."""
    put, logger = listener(on_optimizer_step_end=lambda t: t.step_metrics.update(metrics)), Rows()
    train(make_trainer([put, logger]))
    return logger.rows


def test_step_metrics_may_have_any_unreserved_name():
    losses = [row["loss"] for row in with_step_metrics()]
    rows = with_step_metrics(total=3.0, count=torch.tensor([7.0]))
    assert [row["loss"] for row in rows] == losses
    assert [(row["total"], row["count"]) for row in rows] == [(3.0, 7.0)] * 3
    for name in ("loss", "update", "epoch"):
        with pytest.raises(ValueError, match=rf"step_metrics\['{name}'\] uses a reserved name") as caught:
            with_step_metrics(**{name: 1.0})
        assert not [note for note in caught.value.__notes__ if note.startswith("In training")]  # it is not of a batch


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 4, 7])
def test_rows_average_all_updates_since_the_last_row(tmp_path, every):
    def rows(**kwargs: Any) -> list[list[dict[str, Any]]]:
        loggers = [Rows(), Rows(every)]
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        train(make_trainer([*loggers, saving], seed=0), epochs=3, size=10, **kwargs)
        return [logger.rows for logger in loggers]

    each, found = rows()
    losses = [row["loss"] for row in each]
    assert len(losses) == 15
    means = [sum(losses[end - every : end]) / every for end in range(every, 16, every)]
    assert [row["loss"] for row in found] == pytest.approx(means)
    for update in (5, 6):
        assert rows(resume_from=tmp_path / f"update-{update:09d}") == [each, found]  # states have the rows, too


@pytest.mark.parametrize("value", [None, "x", [1.0], torch.ones(2), torch.ones(2, device="meta")])
def test_a_non_numeric_step_metric_is_named(value):
    with pytest.raises(TypeError, match=r"step_metrics\['mine'\]=.* must be a number"):
        with_step_metrics(mine=value)


def test_a_logger_added_on_resuming_starts_at_that_update(tmp_path):
    def run(*callbacks: Any, **kwargs: Any) -> None:
        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)
        train(make_trainer([saving, *callbacks], seed=0), epochs=2, **kwargs)

    run()
    state, logger = tmp_path / "states" / "update-000000002", Rows()
    with pytest.warns(UserWarning, match="nothing for the callback 'Rows'"):
        run(logger, resume_from=state)
    assert [row["update"] for row in logger.rows] == [3, 4, 5, 6]


# ---------------------------------------------------------------------------------------- rows in the background


class Slow(StepLogger):
    """A logger whose disk blocks until released, and may then fail."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(every_n_updates=1)
        self.error = error
        self.may_answer = threading.Event()
        self.updates: list[int] = []

    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        assert self.may_answer.wait(60)
        self.updates.append(update)
        if self.error is not None:
            raise self.error


def test_no_step_waits_for_a_logger():
    slow = Slow()

    def look(trainer: Any) -> None:
        if trainer.progress.epoch == 2:  # the first epoch is over, and nothing has been logged
            assert slow.updates == []
            slow.may_answer.set()

    train(make_trainer([slow, listener(on_train_epoch_start=look)]), epochs=2)
    assert slow.updates == [1, 2, 3, 4, 5, 6]  # when the run is over, all has been logged, in order


@pytest.mark.parametrize("error", [ConnectionError("the server has gone"), SystemExit("quota exceeded")])
def test_an_error_in_a_logger_ends_the_run(error):
    slow = Slow(error)
    slow.may_answer.set()
    with pytest.raises(type(error), match=str(error)):
        train(make_trainer([slow]), epochs=2)


def test_a_state_waits_for_the_rows_before_it(tmp_path):
    slow = Slow()
    seen: list[list[int]] = []

    def save(trainer: Any, **kwargs: Any) -> None:
        threading.Timer(0.2, slow.may_answer.set).start()
        trainer.save_training_state(tmp_path / "state")
        seen.append(list(slow.updates))

    train(make_trainer([slow, listener(on_train_step_checkpoint=save)], seed=0), size=4)
    assert seen == [[1], [1, 2]]


def test_no_state_is_saved_without_its_rows(tmp_path):
    """Also if states that cannot be written are skipped."""
    slow = Slow(OSError(28, "No space left on device"))
    slow.may_answer.set()
    saver = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1, continue_on_error=True)
    with pytest.raises(RuntimeError, match=r"Slow could not write its rows: .*No space left"):
        train(make_trainer([slow, saver], seed=0))
    assert not list((tmp_path / "states").glob("update-*"))


@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_training_run_end"])
def test_all_rows_are_written_when_another_callback_fails(event):
    def fail(trainer: Any) -> None:
        threading.Timer(0.2, slow.may_answer.set).start()
        raise ValueError("enough of this")

    slow = Slow()
    with pytest.raises(ValueError, match=r"^enough of this"):
        train(make_trainer([listener(**{event: fail}), slow]))
    assert slow.updates == [1, 2, 3]


@OF_THE_SCRIPT
def test_the_script_has_the_expected_number_of_epochs(tmp_path):
    trainer = run(tmp_path, mlflow=False)
    assert (trainer.progress.epochs_completed, trainer.progress.update) == (EPOCHS, UPDATES)
