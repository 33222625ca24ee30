"""Evaluations within epochs, at intervals of updates: what follows them, and that the training stays as it is."""

from __future__ import annotations

import shutil
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import MeanSquaredError

from pytorch_accel_lite import StopTrainingError, Trainer
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    LogMetricsCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
)
from tests.scripts.resumable import CopyStates, run
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    normed_model,
    raises_at,
    weights,
)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_evaluations_every_few_steps_leave_training_unchanged(accumulation):
    weights, histories = [], []
    for callbacks in ([], [StepBasedEvaluationCallback(2)]):
        torch.manual_seed(0)
        model = normed_model()
        trainer = adamw_trainer(model, callbacks=callbacks)
        trainer.train(float64_data(48), 2, float64_data(9), 4, gradient_accumulation_steps=accumulation)
        weights.append(model.state_dict())
        histories.append(trainer.run_history.to_dict())
    assert equal_weights(*weights)
    plain, stepped = histories
    assert len(stepped.pop("intermediate_eval_loss")) == 24 // accumulation // 2
    assert stepped == plain


def test_an_evaluation_within_an_epoch_is_printed_immediately(capsys):
    trainer = adamw_trainer(float64_model(), callbacks=[LogMetricsCallback, StepBasedEvaluationCallback(2)])
    trainer.train(float64_data(32), 1, float64_data(9))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "intermediate_eval_loss",
        "intermediate_eval_loss",
        "train_loss_epoch",
        "eval_loss_epoch",
    ]


def test_a_run_evaluated_within_epochs_resumes_to_the_same_bits(tmp_path):
    extra = (StepBasedEvaluationCallback(2), CopyStates(tmp_path))
    whole = run(tmp_path, resume_from=None, extra=extra, save_every_n_epochs=1)
    for copy in sorted((tmp_path / "copies").glob("*/update-*"))[::4]:
        again = run(tmp_path / f"again-{copy.parent.name}", resume_from=copy, extra=extra[:1])
        assert again["history"] == whole["history"]
        assert equal_weights(again["weights"], whole["weights"])


def train_with_evaluations(callbacks: list[Any], epochs: int = 3, rises: bool = False, **kwargs: Any) -> Trainer:
    """Train with six updates in an epoch, and an evaluation after every fourth and after the last.

    Args:
        rises: whether the loss rises, so that the first evaluation is the best
    """
    model = float64_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, maximize=rises)
    trainer = adamw_trainer(model, optimizer=optimizer, callbacks=callbacks, seed=1)
    data = {"train_dataset": float64_data(24), "eval_dataset": float64_data(9), "per_device_batch_size": 4}
    trainer.train(num_epochs=epochs, evaluate_every="4 updates", **(data | kwargs))
    return trainer


def evaluation_losses_computed_apart(epochs: int) -> dict[int, float]:
    """The evaluation losses of that run, by update, computed apart."""
    found = {}

    def evaluate(trainer: Any, **kwargs: Any) -> None:
        if trainer.progress.update % 4 == 0 or trainer.progress.update == 6 * epochs:
            apart = adamw_trainer(deepcopy(trainer.get_model()), callbacks=[])
            found[trainer.progress.update] = apart.evaluate(float64_data(9), 4)["evaluation_loss"]

    trainer = adamw_trainer(float64_model(), callbacks=[listener(on_update_end=evaluate)], seed=1)
    trainer.train(float64_data(24), epochs, per_device_batch_size=4)
    return found


@pytest.mark.extension("metrics")
def test_evaluations_within_epochs_are_those_of_the_run(tmp_path):
    from pytorch_accel_lite.callbacks import MetricsCallback

    best = SaveBestModelCallback(tmp_path / "best.pt")
    squares = MetricsCallback({"squares": MeanSquaredError()})
    trainer = train_with_evaluations([squares, best])
    expected = evaluation_losses_computed_apart(3)
    assert trainer.run_history.get_metric_values("eval_loss_epoch") == list(expected.values())
    assert trainer.run_history.get_metric_values("squares") == pytest.approx(list(expected.values()))
    assert "intermediate_eval_loss" not in trainer.run_history
    assert best.best_metric == min(expected.values())
    assert trainer.evaluate(float64_data(9), 4)["evaluation_loss"] == best.best_metric, "the weights of that update"


def test_evaluations_by_updates_leave_the_training_unchanged():
    plain = adamw_trainer(float64_model(), seed=1)
    plain.train(float64_data(24), 3, per_device_batch_size=4)
    again = train_with_evaluations([])
    assert equal_weights(weights(again.model), weights(plain.model))


@pytest.mark.parametrize(("patience_in", "update"), [("evaluations", 12), ("epochs", 18)])
def test_early_stopping_counts_evaluations_within_epochs(patience_in, update):
    stopping = EarlyStoppingCallback(2, 1e9, patience_in=patience_in)  # nothing is an improvement
    assert train_with_evaluations([stopping], epochs=9).progress.update == update


@pytest.mark.sampled
@pytest.mark.parametrize("saves_first", [True, False])
def test_the_best_model_of_mid_epoch_stays_after_a_resume(saves_first, tmp_path):
    def run(folder: str, **kwargs: Any) -> Any:
        best = SaveBestModelCallback(tmp_path / folder / "best.pt", load_saved_checkpoint=False)
        states = SaveTrainingStateCallback(tmp_path / folder / "states", save_every_n_steps=1)
        train_with_evaluations([states, best] if saves_first else [best, states], 2, rises=True, **kwargs)
        return best.best_metric, best.best_metric_epoch, torch.load(best.save_path)["model_state_dict"]

    whole = run("whole")
    shutil.copytree(tmp_path / "whole/states", tmp_path / "states")
    for state in sorted((tmp_path / "states").glob("update-*")):
        folder = f"after-{state.name}"
        (tmp_path / folder).mkdir()
        shutil.copy(tmp_path / "whole/best.pt", tmp_path / folder)
        *found, saved = run(folder, resume_from=state)
        assert (found, equal_weights(saved, whole[2])) == ([*whole[:2]], True), state.name


def test_a_schedule_may_follow_evaluations_within_epochs():
    trainer = train_with_evaluations(
        [],
        create_scheduler_fn=partial(ReduceLROnPlateau, patience=0, threshold=1e9),
        scheduler_interval="epoch",
        scheduler_metric="eval_loss_epoch",
    )
    assert trainer.scheduler.last_epoch == 5, "one step for each evaluation"
    assert trainer.optimizer.param_groups[0]["lr"] < 0.01


class FailsOnStep(ReduceLROnPlateau):
    """A schedule that cannot be stepped."""

    def step(self, metrics: Any, epoch: Any = None) -> None:
        raise ArithmeticError("of the schedule")


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError("of the callback"), OSError), (StopTrainingError("enough"), ArithmeticError), (None, ArithmeticError)],
    ids=["error", "stop", "none"],
)
def test_a_schedule_hides_no_error_of_an_evaluation(error, raised):
    callbacks = [] if error is None else [raises_at(4, error, "on_eval_epoch_end")]
    with pytest.raises(raised, match="of the"):
        train_with_evaluations(
            callbacks,
            create_scheduler_fn=FailsOnStep,
            scheduler_interval="epoch",
            scheduler_metric="eval_loss_epoch",
            sanity_check=False,
        )


@pytest.mark.extension("model_ema")
def test_an_averaged_model_is_evaluated_whenever_the_model_is(tmp_path):
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    def train(resume_from: Path | None = None) -> dict[str, Any]:
        states = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)
        ema = ModelEmaCallback(0.5, save_path=tmp_path / "ema.pt")
        history = train_with_evaluations([states, ema], 2, resume_from=resume_from).run_history
        return {name: history[name] for name in history if "eval" in name}

    whole = train()
    assert len(whole["ema_model_eval_loss_epoch"]) == len(whole["eval_loss_epoch"]) == 3
    assert whole["ema_model_eval_loss_epoch"] != whole["eval_loss_epoch"]
    shutil.copytree(tmp_path / "states", tmp_path / "copies")
    for state in sorted((tmp_path / "copies").glob("update-*")):
        assert train(state) == whole, state.name


def test_watching_evaluations_that_are_not_made_is_an_error():
    with pytest.raises(
        ValueError, match=r"watch_metric='intermediate_eval_loss'.*Did you mean|It records: .*eval_loss_ep"
    ):
        train_with_evaluations([SaveBestModelCallback(watch_metric="intermediate_eval_loss")])
