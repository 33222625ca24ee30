"""Intervals of updates, epochs, samples or minutes for evaluations, saves and rows."""

from __future__ import annotations

import json
import re
import shutil
import time
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

from pytorch_accel_lite import Interval, StopTrainingError, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveBestModelCallback, SaveTrainingStateCallback
from tests.launching import SOAK, some_of
from tests.ranks import global_batch, world_size
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_trainer,
    train,
    weights,
)

UPDATES_PER_EPOCH = 6


def run(evaluate_every: Any = None, callbacks: Any = (), epochs: int | None = 3, **kwargs: Any) -> Any:
    """Train with six updates of four samples in an epoch; return the trainer and the updates of its evaluations."""
    evaluated: list[int] = []
    note = listener(on_eval_epoch_end=lambda trainer, **kwargs: evaluated.append(trainer.progress.update))
    trainer = adamw_trainer(float64_model(), callbacks=[*callbacks, note], seed=1)
    data = {"train_dataset": float64_data(24), "eval_dataset": float64_data(9)}
    trainer.train(
        num_epochs=epochs, per_device_batch_size=global_batch(4), evaluate_every=evaluate_every, **(data | kwargs)
    )
    return trainer, evaluated


def due_after(every: str) -> list[int]:
    """The updates at which an interval is due in three epochs, computed independently."""
    number, unit = every.split()
    per_update = {"updates": 1, "samples": 4, "epochs": Fraction(1, UPDATES_PER_EPOCH)}[unit]
    passed = [update * per_update // Fraction(number) for update in range(19)]
    return [update for update in range(1, 19) if passed[update] > passed[update - 1] or update == 18]


EVERY = ["1 updates", "4 updates", "0.25 epochs", "0.4 epochs", "1 epochs", "2 epochs", "2.5 epochs", "10 samples"]


@pytest.mark.sampled
@pytest.mark.parametrize("every", [*EVERY, "1 samples", "1_0 samples"])
def test_evaluations_follow_each_interval_and_the_end(every):
    trainer, evaluated = run(every)
    assert evaluated == due_after(every)
    assert len(trainer.run_history["eval_loss_epoch"]) == len(evaluated)
    assert equal_weights(weights(trainer.model), weights(run()[0].model)), "evaluations change no weights"


@pytest.mark.parametrize("every", [Interval("4 updates"), Interval(4, "updates"), "4 update", " 4Updates "])
def test_an_interval_has_several_spellings(every):
    assert run(every)[1] == due_after("4 updates")


def test_an_interval_of_one_epoch_needs_no_number():
    assert run("epoch")[1] == run()[1] == [6, 12, 18]


def on_ranks() -> Any:
    return world_size(), {every: run(every)[1] for every in EVERY}


@pytest.mark.thorough
@pytest.mark.processes
def test_several_processes_evaluate_at_the_same_updates(two_ranks):
    for processes, found in two_ranks(on_ranks):
        assert processes == 2
        assert found == {every: due_after(every) for every in EVERY}


@pytest.mark.sampled
@pytest.mark.parametrize("every", ["4 updates", "0.4 epochs", "10 samples", "1 epochs"])
def test_resumed_runs_keep_to_the_intervals_of_saved_states(every, tmp_path):
    def train(folder: str, **kwargs: Any) -> Any:
        states = SaveTrainingStateCallback(tmp_path / folder, save_every=every, save_at_end=False)
        trainer, evaluated = run("10 samples", [states], **kwargs)
        return weights(trainer.model), trainer.run_history.to_dict(), evaluated

    expected = train("whole")
    saved = sorted((tmp_path / "whole").glob("update-*"))
    assert [int(path.name[7:]) for path in saved if int(path.name[7:]) != 18] == due_after(every)[:-1]
    for state in (path for path in saved if path.name != "update-000000018"):
        folder = f"after-{state.name}"
        shutil.copytree(state, tmp_path / folder / state.name)
        again = train(folder, resume_from="latest")
        assert equal_weights(again[0], expected[0])
        assert again[1] == expected[1]
        assert again[2] == [update for update in expected[2] if update > int(state.name[7:])]
        assert {path.name for path in (tmp_path / folder).glob("update-*")} == {
            path.name for path in saved if path >= state
        }


class Clock(TrainerCallback):
    """A clock on which every update takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
        self.now += 1


@pytest.mark.parametrize("every", ["4 seconds", "0.0667 minutes"])
def test_intervals_of_time_carry_over_to_a_resumed_run(every, tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    states = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
    trainer, evaluated = run(every, [clock, states])
    first = [4, 8, 12, 16, 18] if every == "4 seconds" else [5, 10, 15, 18]
    assert evaluated == first
    state = sorted(tmp_path.glob("update-*"))[6]
    shutil.copytree(state, tmp_path / "apart" / state.name)
    resumed, again = run(
        every, [clock, SaveTrainingStateCallback(tmp_path / "again")], resume_from=tmp_path / "apart" / state.name
    )
    assert again == [update for update in first if update > 7]
    assert resumed.run_history.to_dict() == trainer.run_history.to_dict()
    assert equal_weights(weights(resumed.model), weights(trainer.model))


def test_intervals_of_time_work_with_one_update_per_epoch(monkeypatch):
    assert run("2 seconds", [Clock(monkeypatch)], epochs=7, train_dataset=float64_data(4))[1] == [2, 4, 6, 7]


def stop_in(event: str, update: int) -> TrainerCallback:
    """A callback that stops the run in an event, after some updates."""

    def stop(self: Any, trainer: Any, **kwargs: Any) -> None:
        if trainer.progress.update == update:
            raise StopTrainingError

    return type("Stop", (TrainerCallback,), {event: stop})()


@pytest.mark.sampled
@pytest.mark.parametrize("event", ["on_update_end", "on_eval_epoch_start", "on_eval_step_end", "on_eval_epoch_end"])
@pytest.mark.soak
@pytest.mark.parametrize("update", [6, *[4, 8] * SOAK])
def test_no_evaluation_is_lost_or_repeated_where_a_run_stops(event, update, tmp_path):
    create = partial(ReduceLROnPlateau, patience=0, threshold=1e9)
    kwargs = {
        "scheduler_interval": "epoch",
        "scheduler_metric": "eval_loss_epoch",
        "create_scheduler_fn": create,
        "evaluate_every": "2 updates",
    }
    whole, _ = run(callbacks=[SaveTrainingStateCallback(tmp_path / "whole")], **kwargs)
    run(callbacks=[SaveTrainingStateCallback(tmp_path / "states"), stop_in(event, update)], **kwargs)
    again, _ = run(callbacks=[SaveTrainingStateCallback(tmp_path / "states")], resume_from="latest", **kwargs)
    assert again.run_history.to_dict() == whole.run_history.to_dict()
    assert equal_weights(weights(again.model), weights(whole.model))
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()


def test_states_are_saved_by_the_clock(tmp_path, monkeypatch):
    run(callbacks=[Clock(monkeypatch), SaveTrainingStateCallback(tmp_path, save_every="7 seconds", save_at_end=False)])
    assert sorted(int(path.name[7:]) for path in tmp_path.glob("update-*")) == [7, 14]


def test_the_best_of_several_evaluations_in_an_epoch_is_kept(tmp_path):
    best = SaveBestModelCallback(tmp_path / "best.pt", keep=3)
    trainer, evaluated = run("2 updates", [best])
    losses = dict(zip(evaluated, trainer.run_history["eval_loss_epoch"], strict=True))
    assert best.best_metric == min(losses.values())
    kept = {int(path.stem.rpartition("update")[2]) for path in tmp_path.glob("best-update*.pt")}
    assert kept == set(sorted(losses, key=lambda update: losses[update])[:3])


@pytest.mark.sampled
@pytest.mark.extension("model_ema")
@pytest.mark.soak
@pytest.mark.parametrize("update", some_of(some_of(range(1, 18))))
def test_a_run_resumed_within_an_epoch_has_the_same_best_models(update, tmp_path):
    """Also from a state saved between an evaluation and the callbacks that look at it."""

    def train(folder: str, **kwargs: Any) -> Any:
        states = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        average = callbacks.ModelEmaCallback(0.5, save_path=tmp_path / f"{folder}-average.pt")
        best = SaveBestModelCallback(tmp_path / f"{folder}-best.pt", load_saved_checkpoint=False)
        trainer, evaluated = run("2 updates", [states, average, best], **kwargs)
        return trainer.run_history.to_dict(), average.best_metric, best.best_metric, evaluated

    history, *bests, evaluated = train("whole")
    assert len(history["ema_model_eval_loss_epoch"]) == len(history["eval_loss_epoch"]) == len(evaluated) == 9
    assert bests == [min(history["ema_model_eval_loss_epoch"]), min(history["eval_loss_epoch"])]
    for name in ("average", "best"):
        shutil.copy(tmp_path / f"whole-{name}.pt", tmp_path / f"again-{name}.pt")
    again = train("again", resume_from=tmp_path / "whole" / f"update-{update:09d}")
    assert again[:3] == (history, *bests)


def test_an_epoch_improves_if_any_of_its_evaluations_does():
    values = iter([5.0, 4.0, 6.0, 6.0, 3.0, 6.0, 6.0, 6.0, 6.0])
    record = listener(on_eval_epoch_end=lambda trainer, **kwargs: trainer.run_history.update_metric("m", next(values)))
    stopping = EarlyStoppingCallback(1, 0.0, "m", greater_is_better=False)
    trainer, _ = run("2 updates", [record, stopping], epochs=9)
    assert trainer.progress.epochs_completed == 2, "only the third epoch has no improvement"
    assert trainer.progress.epoch == 3
    assert stopping.best_metric == 3.0


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize("update", some_of(some_of(range(1, 18))))
def test_a_run_resumed_within_an_epoch_has_the_same_patience(update, tmp_path):
    values = {2: 1.0, 8: 2.0}

    def train(folder: str, **kwargs: Any) -> Any:
        score = listener(
            on_eval_epoch_end=lambda trainer, **kwargs: trainer.run_history.update_metric(
                "score", values.get(trainer.progress.update, 0.0)
            )
        )
        stop = EarlyStoppingCallback(watch_metric="score", greater_is_better=True)
        states = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1, save_at_end=False)
        trainer, evaluated = run("2 updates", [score, stop, states], epochs=5, **kwargs)
        return evaluated, trainer.current_run.end.reason, weights(trainer.model)

    whole = train("whole")
    assert whole[0] == list(range(2, 19, 2)), "two epochs improve by their first evaluation, and the third does not"
    state = f"update-{update:09d}"
    shutil.copytree(tmp_path / "whole" / state, tmp_path / "again" / state)
    again = train("again", resume_from="latest")
    comes_after_the_state = update % UPDATES_PER_EPOCH == 0
    assert again[0] == [each for each in whole[0] if each > update - comes_after_the_state]
    assert again[1] == whole[1]
    assert equal_weights(again[2], whole[2])


def test_each_evaluation_steps_a_schedule_of_a_metric():
    kwargs = {"scheduler_interval": "epoch", "scheduler_metric": "eval_loss_epoch"}
    create = partial(ReduceLROnPlateau, patience=0, threshold=1e9)
    trainer, evaluated = run("4 updates", create_scheduler_fn=create, **kwargs)
    assert trainer.scheduler.last_epoch == len(evaluated) == 5
    assert trainer.scheduler.num_bad_epochs == 0
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**5)


@pytest.mark.extension("metrics_file")
def test_rows_are_written_at_intervals(tmp_path):
    run("2 updates", [callbacks.MetricsFileCallback(tmp_path / "rows.jsonl", every="10 samples")])
    rows = (tmp_path / "rows_updates.jsonl").read_text().splitlines()
    assert [int(re.findall(r'"update": (\d+)', row)[0]) for row in rows] == [3, 5, 8, 10, 13, 15, 18]


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.parametrize(
    ("every", "updates"),
    some_of(
        [("1.5 epochs", [9, 18]), ("1 epochs", [6, 12, 18]), ("3 epochs", [18]), ("0.5 epochs", [3, 6, 9, 12, 15, 18])]
    ),
)
@pytest.mark.extension("metrics_file")
def test_rows_at_intervals_of_epochs_are_of_their_last_updates(every, updates, tmp_path):
    def train(folder: Any, **kwargs: Any) -> str:
        states = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1)
        run(callbacks=[callbacks.MetricsFileCallback(folder / "rows.jsonl", every=every), states], **kwargs)
        return (folder / "rows_updates.jsonl").read_text()

    rows = train(tmp_path / "whole")
    assert [json.loads(row)["update"] for row in rows.splitlines()] == updates
    for update in (5, 6, 7):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / f"from-{update}")
        assert train(folder, resume_from=folder / "states" / f"update-{update:09d}") == rows


@pytest.mark.extension("metrics_file")
def test_an_interval_between_rows_that_is_never_due_is_named(tmp_path):
    with pytest.warns(UserWarning, match="every='19 updates' is never due"):
        run(callbacks=[callbacks.MetricsFileCallback(tmp_path / "rows.jsonl", every="19 updates")])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (float64_data(24)[index % 24] for index in range(10**9))


@pytest.mark.extension("streams")
@pytest.mark.parametrize("every", ["5 updates", "20 samples"])
def test_streams_without_a_length_have_intervals_too(every):
    kwargs = {"train_dataset": Endless(), "epochs": None, "max_num_train_steps": 12}
    assert run(every, **kwargs)[1] == [5, 10, 12]


@pytest.mark.extension("streams")
def test_a_fraction_of_an_unknown_length_is_an_error():
    with pytest.raises(ValueError, match=r"evaluate_every='0.5 epochs': the training data have no length"):
        run("0.5 epochs", train_dataset=Endless(), epochs=None, max_num_train_steps=12)


@pytest.mark.parametrize(
    ("every", "error", "words"),
    [
        ("500 updtes", ValueError, "evaluate_every='500 updtes' must be a positive number and one of updates, epochs"),
        ("500 updtes", ValueError, "Did you mean 'updates'? Write '500 updates', '0.25 epochs'"),
        ("500", ValueError, "evaluate_every='500' must be a positive number and one of"),
        ("0 epochs", ValueError, "evaluate_every='0 epochs' must be a positive number"),
        ("-1 epochs", ValueError, "evaluate_every='-1 epochs' must be a positive number"),
        ("0.5 updates", ValueError, "evaluate_every='0.5 updates' must be an integer number of updates"),
        ("0,25 epochs", ValueError, "evaluate_every='0,25 epochs' must be a positive number"),
        ("0,125 epochs", ValueError, "evaluate_every='0,125 epochs' must be a positive number"),
        ("1000,500 updates", ValueError, "evaluate_every='1000,500 updates' must be a positive number"),
        ("1.2.3 epochs", ValueError, "must be a positive number"),
        ("1e9999999 updates", ValueError, "evaluate_every='1e9999999 updates' must be a positive number"),
        ("1e-9999999 epochs", ValueError, "It must fit into a float."),
        (f"{10**90}{10**90} updates", ValueError, "must be a positive number"),
        (500, TypeError, "evaluate_every=500 must be an interval, such as '500 updates'"),
        (True, TypeError, "evaluate_every=True must be an interval"),
    ],
)
def test_an_invalid_interval_is_refused(every, error, words):
    with pytest.raises(error, match=re.escape(words)):
        run(every)


def test_evaluate_every_and_eval_every_n_epochs_are_exclusive():
    with pytest.raises(ValueError, match="evaluate_every='2 epochs' is instead of eval_every_n_epochs=3"):
        run("2 epochs", eval_every_n_epochs=3)


def test_an_interval_without_data_to_evaluate_on_is_named():
    with pytest.warns(UserWarning, match="evaluate_every='4 updates' has no effect: train.. was given no eval_dataset"):
        run("4 updates", eval_dataset=None)


@pytest.mark.parametrize(
    ("every", "length"), [("19 updates", "18 updates"), ("4 epochs", "3 epochs"), ("73 samples", "72 samples")]
)
def test_an_interval_longer_than_the_run_is_named(every, length, tmp_path):
    with pytest.warns(UserWarning, match=f"evaluate_every='{every}' is never due: the run has {length}"):
        assert run(every)[1] == [18]
    with pytest.warns(UserWarning, match=f"save_every='{every}' is never due: the run has {length}"):
        run(callbacks=[SaveTrainingStateCallback(tmp_path, save_every=every)])


def test_a_run_of_one_update_is_described_in_the_singular():
    with pytest.warns(UserWarning, match=r"evaluate_every='2 updates' is never due: the run has 1 update\."):
        train(make_trainer(), 1, 2, evaluate_every="2 updates", eval_dataset=True)


@pytest.mark.extension("pytorch_accelerated")
def test_an_interval_longer_than_limited_epochs_is_named():
    with pytest.warns(UserWarning, match="evaluate_every='60 samples' is never due: the run has 48 samples"):
        run("60 samples", callbacks=[callbacks.LimitBatchesCallback(4)])
