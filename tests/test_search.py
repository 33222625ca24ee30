"""Search with Optuna: values from a space, trials that are pruned in order, on one process and several."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.experiment import OptunaPruningCallback, suggest_overrides
from tests.cases import search
from tests.experiment_parts import CrashAt, Net, load_data
from tests.launching import run_code

SPACE = {
    "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "model.width": {"low": 2, "high": 8, "step": 2},
    "optimizer": {"choices": ["SGD", "AdamW"]},
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def make_trainer(*callbacks) -> Trainer:
    torch.manual_seed(0)
    model = Net()
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks, seed=0)


def train(trainer: Trainer, **kwargs) -> None:
    trainer.train(load_data(8), 4, load_data(8), per_device_batch_size=4, **kwargs)


def test_a_space_gives_values_of_the_right_kind():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [suggest_overrides(study.ask(), SPACE) for _ in range(20)]
    assert all(1e-4 <= values["optimizer.lr"] <= 1e-1 for values in found)
    assert {values["model.width"] for values in found} == {2, 4, 6, 8}
    assert {values["optimizer"] for values in found} == {"SGD", "AdamW"}
    with pytest.raises(ValueError, match=r"space\['x'\]={'lo': 1} must have choices, or low and high"):
        suggest_overrides(study.ask(), {"x": {"lo": 1}})


def test_a_pruned_trial_ends_in_order_and_counts_as_pruned(tmp_path):
    def objective(trial):
        pruning = OptunaPruningCallback(trial)
        trainer = make_trainer(pruning, SaveTrainingStateCallback(tmp_path / str(trial.number)))
        train(trainer)
        pruning.check_pruned()
        return trainer.run_history.get_latest_metric("eval_loss_epoch")

    study = optuna.create_study(pruner=search.PruneAt(2))
    study.optimize(objective, n_trials=1)
    study.pruner = optuna.pruners.NopPruner()
    study.optimize(objective, n_trials=1)
    pruned, whole = study.trials
    assert (pruned.state.name, list(pruned.intermediate_values)) == ("PRUNED", [1, 2])
    assert (whole.state.name, list(whole.intermediate_values)) == ("COMPLETE", [1, 2, 3, 4])
    assert [path.name for path in Path(tmp_path / "0").glob("update-*")] == ["update-000000004"]  # saved at its end


def test_a_trial_that_resumes_reports_only_what_is_new(tmp_path):
    study = optuna.create_study(pruner=search.PruneAt(9))
    trial = study.ask()
    states = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)
    with pytest.raises(ZeroDivisionError):
        train(make_trainer(OptunaPruningCallback(trial), states, CrashAt(5)))
    assert list(study.trials[0].intermediate_values) == [1, 2]
    states = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)
    train(
        make_trainer(OptunaPruningCallback(trial), states, CrashAt(99)), resume_from="latest"
    )  # a repeated step warns
    assert list(study.trials[0].intermediate_values) == [1, 2, 3, 4]


def test_a_study_of_the_wrong_direction_and_an_unknown_metric_are_refused():
    trial = optuna.create_study(direction="maximize").ask()
    with pytest.raises(
        ValueError, match="The study maximises, but metric='eval_loss_epoch' is better the smaller it is"
    ):
        train(make_trainer(OptunaPruningCallback(trial)))
    with pytest.raises(ValueError, match="accuracy"):
        train(make_trainer(OptunaPruningCallback(trial, "accuracy")))


def test_all_ranks_end_together(two_ranks):
    results = two_ranks(search.pruned)
    assert [(is_pruned, epochs) for is_pruned, epochs, _ in results] == [(True, 2)] * 2
    assert results[0][2].startswith("Optuna prunes this trial: eval_loss_epoch ")


@pytest.mark.programs
def test_without_optuna_the_error_names_the_command_that_installs_it():
    code = """
from tests.launching import forget
forget("optuna", installed=False)
from pytorch_accel_lite.experiment import OptunaPruningCallback
try:
    OptunaPruningCallback(None)
except ImportError as error:
    print(error)
"""
    assert "OptunaPruningCallback needs optuna. Install it with: pip install" in run_code(code)
