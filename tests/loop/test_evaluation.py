"""Evaluation: on which data, after which epochs, and with which losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveBestModelCallback, StepBasedEvaluationCallback
from pytorch_accel_lite.data import OwnShard
from tests.small_models import adamw_trainer, float64_data, float64_model, listener, normed_model


def test_a_trainer_with_its_own_loader_evaluates_without_data():
    data = float64_data(9)

    class Own(Trainer):
        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            return DataLoader(data, batch_size=batch_size)

    model = float64_model()
    within = listener(on_train_epoch_end=lambda t: losses.append(t.evaluate()))
    losses: list[dict[str, float]] = []
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[within])
    trainer.train(float64_data(8), 1)
    losses.append(trainer.evaluate())
    assert losses == 2 * [trainer.evaluate(data)]
    assert losses[0]["evaluation_loss"] > 0
    assert "eval_loss_epoch" not in trainer.run_history.get_metric_names()
    assert len(trainer.predict(None)) == 9


def collate_adding_the_size(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y) + len(samples)


def evaluated_targets(eval_dataset: Any, evaluate: dict[str, Any], **train: Any) -> tuple[list[Any], list[Any]]:
    """The targets of the batches that a training, and ``evaluate()`` after it, evaluate on."""
    seen: list[Any] = []
    note = listener(on_eval_step_end=lambda t, batch, **_: seen.append(batch[1].flatten().tolist()))
    trainer = adamw_trainer(float64_model(), callbacks=[note], seed=1)
    trainer.train(float64_data(8), 1, eval_dataset, sanity_check=False, **train)
    in_training = seen.copy()
    seen.clear()
    trainer.evaluate(**evaluate)
    return in_training, seen


EVALUATED = float64_data(37)
PART = DataLoader(EVALUATED, 5, sampler=range(16, 32), drop_last=True)


@pytest.mark.parametrize(
    ("eval_dataset", "train"),
    [
        pytest.param(PART, {}, id="loader"),
        # whose arguments are for the training data alone
        pytest.param(PART, {"collate_fn": collate_adding_the_size, "per_device_batch_size": 3}, id="loader, arguments"),
        pytest.param({"part": PART, "all": EVALUATED}, {"per_device_batch_size": 6}, id="by name"),
        pytest.param(
            OwnShard([EVALUATED[:5], EVALUATED[5:7]]), {}, marks=pytest.mark.extension("streams"), id="own shard"
        ),
        pytest.param(EVALUATED, {"collate_fn": collate_adding_the_size, "per_device_batch_size": 6}, id="collate_fn"),
        pytest.param(
            EVALUATED,
            {"eval_dataloader_kwargs": {"sampler": range(7, 20), "batch_size": 5, "drop_last": True}},
            id="sampler of evaluations",
        ),
        pytest.param(
            EVALUATED,
            {"eval_dataloader_kwargs": {"collate_fn": collate_adding_the_size}, "per_device_batch_size": 6},
            id="collate_fn of evaluations",
        ),
    ],
)
def test_evaluate_alone_reads_what_the_training_evaluated(eval_dataset, train):
    in_training, after = evaluated_targets(eval_dataset, {}, **train)
    assert after == in_training != []


def test_arguments_of_evaluate_come_before_those_of_the_training():
    kwargs = {"batch_size": 5, "collate_fn": collate_adding_the_size, "sampler": range(20)}
    train = {"eval_dataloader_kwargs": kwargs, "per_device_batch_size": 5}

    def read(**evaluate: Any) -> list[Any]:
        return evaluated_targets(EVALUATED, evaluate, **train)[1]

    assert [len(batch) for batch in read(per_device_batch_size=16)] == [16, 4]
    assert [len(batch) for batch in read(per_device_batch_size=8)] == [8, 8, 4]
    assert read(collate_fn=torch.utils.data.default_collate)[0] == EVALUATED.tensors[1][:5].flatten().tolist()
    assert [len(batch) for batch in read(dataloader_kwargs={})] == [5] * 7 + [2]
    assert [len(batch) for batch in read(dataset=float64_data(9))] == [8, 1]
    with pytest.raises(ValueError, match="per_device_batch_size=7 is for a dataset, but dataset is a loader"):
        evaluated_targets(PART, {"per_device_batch_size": 7})


def test_an_own_loader_gets_the_data_of_the_training_again():
    class Own(Trainer):
        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            asked.append((self.eval_dataset, self.collate_fn, batch_size, eval_dl_kwargs))
            return super().create_eval_dataloader(batch_size, eval_dl_kwargs)

    asked: list[Any] = []
    model = float64_model()
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[])
    trainer.train(float64_data(8), 1, PART, 16, eval_dataloader_kwargs={"timeout": 0}, sanity_check=False)
    trainer.evaluate()
    assert asked == 2 * [(PART, None, 16, {"timeout": 0})]


def test_run_evaluation_calls_a_list_of_callbacks():
    class Evaluates(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            trainer.run_evaluation(prefix="mine_", callbacks=[note])
            with pytest.raises(TypeError, match=r"model=.small. must be a torch\.nn\.Module, not str"):
                trainer.run_evaluation("small")

    ended = []
    note = listener(on_eval_epoch_end=lambda trainer, **_: ended.append(trainer.progress.epoch))
    trainer = adamw_trainer(float64_model(), callbacks=[Evaluates])
    trainer.train(float64_data(8), 2, float64_data(4), 4)
    assert ended == [1, 2]


def test_run_evaluation_restores_modes_losses_and_generators():
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

    trainer = adamw_trainer(normed_model(), callbacks=[Looks])
    trainer.train(float64_data(16), 1, float64_data(9))
    assert len(trainer.run_history.get_metric_values("mine_intermediate_eval_loss")) == 4


def test_several_datasets_are_evaluated_by_name():
    trainer = adamw_trainer(float64_model(), callbacks=[StepBasedEvaluationCallback(2)])
    trainer.train(float64_data(16), 1, {"a": float64_data(9), "b": float64_data(4)})
    names = trainer.run_history.get_metric_names()
    assert {"a_intermediate_eval_loss", "b_intermediate_eval_loss", "a_eval_loss_epoch"} <= set(names)


def test_evaluation_after_every_nth_epoch_and_the_last(tmp_path):
    stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.0)
    best = SaveBestModelCallback(tmp_path / "best.pt", load_saved_checkpoint=False)
    model = float64_model()
    trainer = adamw_trainer(model, callbacks=[best, stop], optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    trainer.train(float64_data(16), 5, float64_data(9), eval_every_n_epochs=2)
    assert trainer.progress.epochs_completed == 5
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 3
    assert trainer.run_history.to_dataframe()["eval_loss_epoch"].dropna().index.tolist() == [2, 4, 5]
    assert best.best_metric_epoch == 5


def test_a_metric_never_recorded_is_an_error_when_first_due():
    stop = EarlyStoppingCallback(watch_metric="accuracy", greater_is_better=True)
    trainer = adamw_trainer(float64_model(), callbacks=[stop, listener()])
    with pytest.raises(ValueError, match=r"EarlyStoppingCallback\(watch_metric='accuracy'\): the run has not"):
        trainer.train(float64_data(16), 5, float64_data(9), eval_every_n_epochs=2)
    assert trainer.progress.epoch == 2


def test_intervals_of_evaluations_are_at_least_1():
    with pytest.raises(ValueError, match="eval_every_n_steps=0 must be at least 1"):
        StepBasedEvaluationCallback(0)
    with pytest.raises(ValueError, match="eval_every_n_epochs=0 must be at least 1"):
        adamw_trainer(float64_model()).train(float64_data(8), 1, eval_every_n_epochs=0)


def test_evaluating_without_data_is_an_error():
    with pytest.raises(ValueError, match="Pass eval_dataset to train"):
        adamw_trainer(float64_model(), callbacks=[StepBasedEvaluationCallback(1)]).train(float64_data(8), 1)
    with pytest.raises(RuntimeError, match=r"call evaluate\(dataset\)"):
        adamw_trainer(nn.Linear(5, 1).double()).run_evaluation()
