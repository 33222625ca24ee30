"""Evaluating within a run changes nothing of the training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import (
    EarlyStoppingCallback,
    LogMetricsCallback,
    SaveBestModelCallback,
    StepBasedEvaluationCallback,
)
from tests.launching import run_elastic_script
from tests.scripts.all_callbacks import run_with_all
from tests.scripts.resumable import CopyStates, run
from tests.tasks import equal, listener, quiet_trainer, regression_data, small_model
from tests.test_ema import normed_model


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trained_weights_are_the_same_with_and_without_it(accumulation):
    weights, histories = [], []
    for callbacks in ([], [StepBasedEvaluationCallback(2)]):
        torch.manual_seed(0)
        model = normed_model()
        trainer = quiet_trainer(model, callbacks=callbacks)
        trainer.train(regression_data(48), 2, regression_data(9), 4, gradient_accumulation_steps=accumulation)
        weights.append(model.state_dict())
        histories.append(trainer.run_history.to_dict())
    assert equal(*weights)
    plain, stepped = histories
    assert len(stepped.pop("intermediate_eval_loss")) == 24 // accumulation // 2
    assert stepped == plain


def test_a_trainer_that_makes_its_own_loader_evaluates_without_a_dataset():
    data = regression_data(9)

    class Own(Trainer):
        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            return DataLoader(data, batch_size=batch_size)

    model = small_model()
    within = listener(on_train_epoch_end=lambda t: losses.append(t.evaluate()))
    losses: list[dict[str, float]] = []
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[within])
    trainer.train(regression_data(8), 1)
    losses.append(trainer.evaluate())
    assert losses == 2 * [trainer.evaluate(data)]
    assert losses[0]["evaluation_loss"] > 0
    assert "eval_loss_epoch" not in trainer.run_history.get_metric_names()
    assert len(trainer.predict(None)) == 9


def test_modes_losses_and_generators_are_put_back():
    class Looks(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            trainer.model[0].eval()
            before = trainer.running_loss, torch.get_rng_state(), np.random.get_state()[1].copy()
            losses = trainer.run_evaluation(prefix="mine_")
            assert losses == trainer.run_evaluation(prefix="mine_")
            assert losses.keys() == {"intermediate_eval_loss"}
            assert trainer.running_loss == before[0]
            assert torch.equal(torch.get_rng_state(), before[1])
            assert np.array_equal(np.random.get_state()[1], before[2])
            assert not trainer.model[0].training
            assert trainer.model[1].training

        def on_eval_step_end(self, trainer, **kwargs):
            assert not any(module.training for module in trainer.model.modules())

    trainer = quiet_trainer(normed_model(), callbacks=[Looks])
    trainer.train(regression_data(16), 1, regression_data(9))
    assert len(trainer.run_history.get_metric_values("mine_intermediate_eval_loss")) == 4


def test_several_datasets_are_evaluated_by_name():
    trainer = quiet_trainer(small_model(), callbacks=[StepBasedEvaluationCallback(2)])
    trainer.train(regression_data(16), 1, {"a": regression_data(9), "b": regression_data(4)})
    names = trainer.run_history.get_metric_names()
    assert {"a_intermediate_eval_loss", "b_intermediate_eval_loss", "a_eval_loss_epoch"} <= set(names)


def test_it_is_printed_when_it_happens(capsys):
    trainer = quiet_trainer(small_model(), callbacks=[LogMetricsCallback, StepBasedEvaluationCallback(2)])
    trainer.train(regression_data(32), 1, regression_data(9))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "intermediate_eval_loss",
        "intermediate_eval_loss",
        "train_loss_epoch",
        "eval_loss_epoch",
    ]


def test_a_run_that_evaluates_in_its_epochs_goes_on_to_the_same_bits(tmp_path):
    extra = (StepBasedEvaluationCallback(2), CopyStates(tmp_path))
    whole = run(tmp_path, resume_from=None, extra=extra, save_every_n_epochs=1)
    for copy in sorted((tmp_path / "copies").glob("*/update-*"))[::4]:
        again = run(tmp_path / f"again-{copy.parent.name}", resume_from=copy, extra=extra[:1])
        assert again["history"] == whole["history"]
        assert equal(again["weights"], whole["weights"])


def test_evaluation_after_every_nth_epoch_and_the_last(tmp_path):
    stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.0)
    best = SaveBestModelCallback(tmp_path / "best.pt", load_saved_checkpoint=False)
    model = small_model()
    trainer = quiet_trainer(model, callbacks=[best, stop], optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    trainer.train(regression_data(16), 5, regression_data(9), eval_every_n_epochs=2)
    assert trainer.progress.epochs_completed == 5
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 3
    assert trainer.run_history.to_dataframe()["eval_loss_epoch"].dropna().index.tolist() == [2, 4, 5]
    assert best.best_metric_epoch == 5
    # A metric that is never recorded is pointed out as soon as it was due.
    stop = EarlyStoppingCallback(watch_metric="accuracy", greater_is_better=True)
    trainer = quiet_trainer(small_model(), callbacks=[stop, listener()])
    with pytest.raises(ValueError, match=r"EarlyStoppingCallback\(watch_metric='accuracy'\): the run has not"):
        trainer.train(regression_data(16), 5, regression_data(9), eval_every_n_epochs=2)
    assert trainer.progress.epoch == 2


def test_bad_input():
    with pytest.raises(ValueError, match="eval_every_n_steps=0 must be at least 1"):
        StepBasedEvaluationCallback(0)
    with pytest.raises(ValueError, match="eval_every_n_epochs=0 must be at least 1"):
        quiet_trainer(small_model()).train(regression_data(8), 1, eval_every_n_epochs=0)
    with pytest.raises(ValueError, match="Pass eval_dataset to train"):
        quiet_trainer(small_model(), callbacks=[StepBasedEvaluationCallback(1)]).train(regression_data(8), 1)
    with pytest.raises(RuntimeError, match=r"call evaluate\(dataset\)"):
        quiet_trainer(nn.Linear(5, 1).double()).run_evaluation()


@pytest.mark.processes
def test_all_callbacks_together_are_resumed_to_the_same_bits_on_two_processes(tmp_path, job):
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    killed = run_elastic_script(2, "tests/scripts/all_callbacks.py", str(tmp_path / "killed"), "5")
    assert killed.returncode != 0
    assert (tmp_path / "killed" / "killed").exists()
    whole = job(2).run(run_with_all, tmp_path / "whole")
    again = job(2).run(run_with_all, tmp_path / "killed", 5)
    results = [whole[0], again[0]]
    assert "Resuming from" in again.output
    assert results[0]["processes"] == 2
    assert results[0]["progress"]["update"] == 9
    assert len(results[0]["history"]["intermediate_mae"]) == 4
    for name in ("history", "order", "progress"):
        assert results[0][name] == results[1][name]
    for name in ("weights", "ema"):
        assert equal(results[0][name], results[1][name])
    # Only the first process of a machine prints.
    assert whole.output.count("Starting epoch 1/3") == 1
