"""Pruned Optuna trials end cleanly, on one process and several."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
import torch

from pytorch_accel_lite import Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.integrations import OptunaPruningCallback
from tests.launching import run_code
from tests.ranks import rank
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model


class PruneAt(optuna.pruners.BasePruner):
    """Prunes every trial after an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def prune(self, study, trial):
        return trial.last_step >= self.epoch


SPACE = {"optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}}


class CrashAt(TrainerCallback):
    """Fails after an update."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_step_end(self, trainer, **kwargs):
        if trainer.progress.update == self.update:
            raise ZeroDivisionError


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def searching_trainer(*listed) -> Trainer:
    model = float64_model()
    return adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), callbacks=listed, seed=0)


def train(trainer: Trainer, **kwargs) -> None:
    trainer.train(float64_data(8), 4, float64_data(8), per_device_batch_size=4, **kwargs)


def test_a_pruned_trial_ends_cleanly_and_counts_as_pruned(tmp_path):
    def objective(trial):
        pruning = OptunaPruningCallback(trial)
        trainer = searching_trainer(pruning, SaveTrainingStateCallback(tmp_path / str(trial.number)))
        train(trainer)
        pruning.check_pruned()
        return trainer.run_history.get_latest_metric("eval_loss_epoch")

    study = optuna.create_study(pruner=PruneAt(2))
    study.optimize(objective, n_trials=1)
    study.pruner = optuna.pruners.NopPruner()
    study.optimize(objective, n_trials=1)
    pruned, whole = study.trials
    assert (pruned.state.name, list(pruned.intermediate_values)) == ("PRUNED", [1, 2])
    assert (whole.state.name, list(whole.intermediate_values)) == ("COMPLETE", [1, 2, 3, 4])
    assert [path.name for path in Path(tmp_path / "0").glob("update-*")] == ["update-000000004"]  # saved at its end


@pytest.mark.extension("metrics_file")
def test_callbacks_after_the_one_that_prunes_complete_the_run(tmp_path):
    trial = optuna.create_study(pruner=PruneAt(2)).ask()
    best = SaveBestModelCallback(tmp_path / "best.pt")
    pruning = OptunaPruningCallback(trial)
    trainer = searching_trainer(pruning, best, callbacks.MetricsFileCallback(tmp_path / "metrics.jsonl"))
    train(trainer)
    losses = trainer.run_history["eval_loss_epoch"]
    assert pruning.is_pruned
    assert losses[1] < losses[0]
    assert best.best_metric_epoch == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.extension("metrics_file")
def test_two_trials_on_one_folder_are_an_error_before_training(tmp_path):
    study = optuna.create_study()
    for name in ("first.jsonl", "second.jsonl"):
        train(searching_trainer(OptunaPruningCallback(study.ask()), callbacks.MetricsFileCallback(tmp_path / name)))
    before = (tmp_path / "first.jsonl").read_text()
    trainer = searching_trainer(
        callbacks.MetricsFileCallback(tmp_path / "first.jsonl"), OptunaPruningCallback(study.ask())
    )
    with pytest.raises(ValueError, match=r"Trial 2 would write to '.*first.jsonl', but that belongs to trial 0"):
        train(trainer)
    assert (tmp_path / "first.jsonl").read_text() == before


def test_a_trial_ends_in_the_same_bits_after_others():
    study = optuna.create_study(pruner=PruneAt(2))
    ended = []
    for clips in (False, True, False):
        trainer = searching_trainer(OptunaPruningCallback(study.ask()))
        train(trainer, gradient_accumulation_steps=2 if clips else 1, gradient_clip_norm=0.1 if clips else None)
        ended.append(trainer.model.state_dict())
    assert equal_weights(ended[0], ended[2])
    assert not equal_weights(ended[0], ended[1])


def test_a_wrong_direction_or_an_unknown_metric_is_an_error():
    trial = optuna.create_study(direction="maximize").ask()
    with pytest.raises(ValueError, match=r"smaller is better\. Create the study with"):
        train(searching_trainer(OptunaPruningCallback(trial)))
    with pytest.raises(ValueError, match=r"metric='accuracy'.: the run will not record it"):
        train(searching_trainer(OptunaPruningCallback(trial, "accuracy")))


class Accuracy(TrainerCallback):
    """Records a metric of which only the study knows the direction."""

    def on_training_run_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric("my_accuracy", trainer.progress.epoch)


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_the_study_knows_the_direction_of_other_metrics(direction, recwarn):
    trial = optuna.create_study(direction=direction).ask()
    pruning = OptunaPruningCallback(trial, "my_accuracy")
    train(searching_trainer(Accuracy(), pruning))
    assert trial.study.trials[0].intermediate_values == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert pruning.state_dict()["greater_is_better"] == (direction == "maximize")
    assert not [warning for warning in recwarn if "greater values are better" in str(warning.message)]


def run_trials() -> tuple[bool, int, str | None]:
    """Whether a rank was told that the trial is pruned, how far it came, and why it stopped."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trial = optuna.create_study(pruner=PruneAt(2)).ask() if rank() == 0 else None
    pruning = OptunaPruningCallback(trial)
    trainer = searching_trainer(pruning)
    train(trainer)
    return pruning.is_pruned, trainer.progress.epoch, trainer.stop_reason


def test_all_ranks_end_together(two_ranks):
    results = two_ranks(run_trials)
    assert [(is_pruned, epochs) for is_pruned, epochs, _ in results] == [(True, 2)] * 2
    assert results[0][2].startswith("Optuna prunes this trial: eval_loss_epoch ")


@pytest.mark.programs
def test_without_optuna_the_error_says_how_to_install_it():
    code = """
from tests.launching import forget
forget("optuna", installed=False)
from pytorch_accel_lite.integrations import OptunaPruningCallback
try:
    OptunaPruningCallback(None)
except ImportError as error:
    print(error)
"""
    assert "OptunaPruningCallback needs optuna. Install it with: pip install" in run_code(code)


def test_the_best_trial_can_be_run_again():
    callback = OptunaPruningCallback(optuna.trial.FixedTrial({}))
    train(searching_trainer(callback))
    assert not callback.is_pruned


def saving(folder: Path, trial: optuna.Trial, *callbacks) -> Trainer:
    """The trainer of a trial, which saves a training state after each epoch."""
    states = SaveTrainingStateCallback(folder, save_every_n_epochs=1)
    return searching_trainer(OptunaPruningCallback(trial), states, *callbacks)


def test_a_trial_that_was_killed_continues_to_the_same_bits(tmp_path):
    search = pytest.importorskip("pytorch_accel_lite.experiment", reason="an extension of its own")
    study = optuna.create_study(pruner=PruneAt(9))
    whole = saving(tmp_path / "whole", study.ask(), CrashAt(99))
    train(whole)
    trial = study.ask()
    values = search.suggest_overrides(trial, SPACE, "runs")
    with pytest.raises(ZeroDivisionError):
        train(saving(tmp_path / "killed", trial, CrashAt(5)))
    study.tell(0, 0.0)
    assert search.retry_killed_trials(study) == [1]
    again = study.ask()
    assert search.suggest_overrides(again, SPACE, "runs") == values  # its folder, too
    assert values["output_dir"] == "runs/1"
    resumed = saving(tmp_path / "killed", again, CrashAt(99))
    train(resumed, resume_from="latest")
    assert equal_weights(resumed.model.state_dict(), whole.model.state_dict())
    first, killed, last = study.trials
    assert (killed.state.name, list(killed.intermediate_values)) == ("FAIL", [1, 2])
    assert last.intermediate_values == first.intermediate_values
    assert search.retry_killed_trials(study) == [2]


def test_a_pruned_trial_is_still_pruned_after_a_kill(tmp_path):
    study = optuna.create_study(pruner=PruneAt(2))
    train(saving(tmp_path, study.ask()))
    study.tell(0, state=optuna.trial.TrialState.FAIL)
    study.enqueue_trial({})
    resumed = saving(tmp_path, study.ask())
    train(resumed, resume_from="latest")
    with pytest.raises(optuna.TrialPruned):
        resumed.callbacks[0].check_pruned()
