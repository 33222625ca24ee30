"""Early stopping and time limits: when a run stops, and what it then has."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import StopTrainingError, Trainer
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    TimeLimitCallback,
)
from tests.ranks import every_state, global_batch, shared_folder
from tests.shared_trainings import scripted
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_model,
    make_trainer,
    raises_at,
    same_bits,
    train,
    weights,
)

# The scores of these scripts are as good as one says.
pytestmark = pytest.mark.filterwarnings("ignore:.*whether greater values are better is unknown")


@pytest.mark.parametrize(
    ("script", "arguments", "epochs", "stops"),
    [
        ([3, 2, 1], {}, 3, False),
        ([3, 3, 1], {}, 2, True),
        ([3, 3, 3, 3], {"early_stopping_patience": 2}, 3, True),
        ([3, 4, 2, 3, 4, 1], {"early_stopping_patience": 2}, 5, True),
        ([1, 2, 3], {"greater_is_better": True}, 3, False),
        ([1, 2, 2], {"greater_is_better": True}, 3, True),
        ([1, 2, 2, 3], {"greater_is_better": True}, 3, True),
        ([3, 2.95, 2], {"early_stopping_threshold": 0.1}, 2, True),
        ([3, 2.85, 2], {"early_stopping_threshold": 0.1}, 3, False),
        ([3, 3, 2], {"early_stopping_threshold": 0}, 2, True),
        ([3, 2.999, 2], {"early_stopping_threshold": 0}, 3, False),
        # small steps count from the best value that was an improvement
        ([3, 2.94, 2.88, 2], {"early_stopping_threshold": 0.1, "early_stopping_patience": 2}, 4, False),
        ([math.nan, math.nan, 1], {"early_stopping_patience": 2}, 2, True),
        ([math.nan, 3, 2], {"early_stopping_patience": 2}, 3, False),
        ([3, math.nan, 2], {"early_stopping_patience": 2}, 3, False),
    ],
)
def test_early_stopping_stops_after_epochs_without_improvement(script, arguments, epochs, stops):
    trainer = scripted(script, EarlyStoppingCallback(watch_metric="score", **arguments))
    assert trainer.progress.epoch == len(trainer.run_history.get_metric_values("score")) == epochs
    assert (trainer.stop_reason is not None) == stops
    assert not stops or "score" in trainer.stop_reason


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


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_a_finite_value_improves_on_an_infinite_baseline(mode):
    stops = EarlyStoppingCallback(1, 0.01, "score", False, threshold_mode=mode, baseline=math.inf)
    trainer = scripted([3.0, 2.0, 2.0, 1.0], stops)
    assert trainer.progress.epoch == 3
    assert stops.best_metric == 2.0


def test_an_infinite_first_value_is_saved_but_does_not_improve(tmp_path):
    stops, saves = EarlyStoppingCallback(2, watch_metric="score"), SaveBestModelCallback(tmp_path / "best.pt", "score")
    trainer = scripted([math.inf, math.inf, 3.0], stops, saves)
    assert trainer.progress.epoch == 2
    assert (stops.best_metric, saves.best_metric, saves.best_metric_epoch) == (None, math.inf, 1)


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


@pytest.mark.sampled
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


def stopped_within_an_epoch() -> list[Any]:
    """How a run ends that an evaluation within an epoch stops, then those resumed from its last states."""
    with shared_folder() as folder:

        def ends(name: str, resume_from: Path | None = None) -> Any:
            stopping = EarlyStoppingCallback(early_stopping_threshold=1, patience_in="evaluations")
            model = float64_model()
            trainer = adamw_trainer(model, callbacks=[stopping, *every_state(folder / name)], seed=0)
            trainer.train(
                float64_data(), 2, float64_data(8), global_batch(4), evaluate_every="3 updates", resume_from=resume_from
            )
            return trainer.progress.update, trainer.run_history.get_metric_values("train_loss_epoch"), weights(model)

        whole = ends("whole")
        return [whole, *(ends(state.name, state) for state in sorted((folder / "whole").glob("update-*"))[-2:])]


def test_a_stop_within_an_epoch_comes_at_the_same_update(two_ranks):
    alone = stopped_within_an_epoch()
    for ended in (alone, *two_ranks(stopped_within_an_epoch)):
        assert [(update, len(losses)) for update, losses, _ in ended] == [(6, 1)] * 3
        assert all(same_bits(one, ended[0]) for one in ended)


def test_a_run_pauses_at_a_time_limit_and_can_be_resumed(here):
    whole = train(make_trainer(seed=1), epochs=2, eval_dataset=True)
    updates, trainer = [], make_trainer()
    while trainer.progress.epochs_completed != 2:
        limit = TimeLimitCallback(timedelta(microseconds=1))
        trainer = make_trainer([limit, SaveTrainingStateCallback("states", save_at_end=False)], seed=1)
        train(trainer, epochs=2, eval_dataset=True, resume_from="latest")
        updates.append(trainer.progress.update)
        assert trainer.stop_reason in (None, "Stopping: the time limit of 0:00:00.000001 is reached.")
    assert updates == [1, 2, 3, 3, 4, 5, 6]  # after each update but the last, and after the first epoch's evaluation
    assert trainer.stop_reason is None
    assert equal_weights(weights(trainer.model), weights(whole.model))
    assert trainer.run_history.to_dict() == whole.run_history.to_dict()


def test_a_run_within_its_time_limit_is_not_stopped():
    trainer = train(make_trainer([TimeLimitCallback(3600)]))
    assert trainer.stop_reason is None
    assert trainer.progress.update == 3


@pytest.mark.parametrize("length", [{"epochs": 2}, {"epochs": None, "max_num_train_steps": 6}])
def test_a_time_limit_does_not_stop_a_run_after_its_last_update(length, here):
    limit = TimeLimitCallback(3600)

    def reach_limit(trainer, **kwargs):
        if trainer.progress.update == 6:
            limit.seconds = 1e-9

    callbacks = [listener(on_update_end=reach_limit), limit, SaveTrainingStateCallback("states")]
    trainer = train(make_trainer(callbacks), eval_dataset=True, **length)
    assert trainer.stop_reason is None
    assert trainer.is_finished
    assert len(trainer.run_history["eval_loss_epoch"]) == 2
    assert [state.name for state in Path("states").glob("update-*")] == ["update-000000006"]


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
        ({"early_stopping_threshold": math.inf}, ValueError, "threshold=inf must be 0 or more, and finite"),
        ({"baseline": math.nan}, ValueError, "baseline=nan must be a number"),
        ({"patience_in": "updates"}, ValueError, "patience_in='updates' must be 'epochs' or 'evaluations'"),
    ],
)
def test_early_stopping_refuses_invalid_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        EarlyStoppingCallback(**arguments)
