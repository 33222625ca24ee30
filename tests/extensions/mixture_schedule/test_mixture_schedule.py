"""Weights of a mixture that change from epoch to epoch: the order, resuming, several processes, what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import MixtureScheduleCallback
from pytorch_accel_lite.data import Mixture
from tests.ranks import every_state, run_and_resume
from tests.tasks import equal, listener, make_data, make_model, quiet_trainer, weights

STAGES = {0: {"easy": 3, "hard": 1}, 2: {"easy": 1, "hard": 3}}


def mixture() -> Mixture:
    data = make_data(16)
    easy, hard = (TensorDataset(*(tensor[part] for tensor in data.tensors)) for part in (slice(6), slice(6, 16)))
    return Mixture({"easy": easy, "hard": hard}, num_samples=8)


def of_metrics(epoch: int, metrics: dict[str, float]) -> dict[str, float]:
    """More of what is hard, the smaller the last loss."""
    loss = metrics.get("eval_loss_epoch", 1.0)
    return {"easy": 1.0, "hard": 1.0 if epoch == 1 else min(2.0 + epoch / (1 + loss), 5.0)}


def trained(folder: Path | None = None, schedule: Any = STAGES, linear: bool = False, **kwargs: Any) -> Trainer:
    seen: list[int] = []
    keeping = listener(on_train_step_end=lambda trainer, **_: seen.extend(trainer.batch_indices))
    callbacks = [*every_state(folder), MixtureScheduleCallback(schedule, linear=linear), keeping]
    trainer = quiet_trainer(make_model(), seed=3, callbacks=callbacks)
    trainer.train(mixture(), 4, make_data(6), per_device_batch_size=2, **kwargs)
    vars(trainer)["seen"] = seen
    return trainer


def shares(trainer: Trainer) -> list[float]:
    return [float(value) for value in trainer.run_history.get_metric_values("share_hard")]


@pytest.mark.parametrize(
    ("schedule", "linear", "hard"),
    [
        (STAGES, False, [0.25, 0.25, 0.75, 0.75]),
        ({0: {"easy": 3, "hard": 1}, 3: {"easy": 1, "hard": 15}}, True, [0.25, 0.5, 0.75, 0.875]),
        (lambda epoch, metrics: {"easy": 1, "hard": epoch}, False, [0.5, 0.625, 0.75, 0.75]),
        (None, False, [0.625] * 4),
    ],
)
def test_the_shares_change_and_are_recorded(schedule, linear, hard):
    trainer = trained(schedule=schedule, linear=linear)
    assert shares(trainer) == hard
    by_epoch = [trainer.seen[first : first + 8] for first in range(0, 32, 8)]
    assert [sum(index >= 6 for index in epoch) / 8 for epoch in by_epoch] == hard


def test_each_dataset_is_read_on_from_where_it_was():
    hard = [index for index in trained().seen if index >= 6]  # 2 + 2 + 6 + 6 of 10
    assert set(hard[:10]) == set(range(6, 16))
    assert len(set(hard[10:])) == 6


def test_a_second_run_begins_with_the_first_stage():
    callbacks = [MixtureScheduleCallback(STAGES)]
    data, results = mixture(), []
    for _ in range(2):
        trainer = quiet_trainer(make_model(), seed=3, callbacks=callbacks)
        trainer.train(data, 3)
        results.append(weights(trainer.model))
    assert equal(*results)


def run_of_metrics(folder: Path | None = None, **kwargs: Any) -> Trainer:
    return trained(folder, of_metrics, **kwargs)


def result(trainer: Trainer) -> dict[str, torch.Tensor]:
    return weights(trainer.get_model()) | {"shares": torch.tensor(shares(trainer))}


@pytest.mark.processes
def test_any_number_of_processes_resumes_to_the_same_bits(two_ranks):
    whole, *resumed = run_and_resume(run_of_metrics, result)
    assert len(resumed) >= 3
    assert all(equal(other, whole) for other in resumed)
    assert len(whole["shares"].unique()) > 1
    for first, *others in two_ranks.run(run_and_resume, run_of_metrics, result):
        assert torch.equal(first["shares"], whole["shares"])
        assert all(equal(other, first) for other in others)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ({1: {"easy": 1, "hard": 1}}, {}, "must be stages that begin with 0"),
        ({0: 3}, {}, r"weights\[0\]=3 must be weights of the datasets"),
        (of_metrics, {"linear": True}, "linear=True needs stages"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MixtureScheduleCallback(schedule, **options)


@pytest.mark.parametrize(
    ("data", "message"),
    [(make_data(), r"needs a Mixture to train on, not a TensorDataset"), (mixture(), "weights has 'hart'.*'hard'")],
)
def test_a_mistake_shows_before_training(data, message):
    stages = {0: {"easy": 1, "hard": 1}, 5: {"easy": 1, "hart": 1}}
    trainer = quiet_trainer(make_model(), callbacks=[MixtureScheduleCallback(stages)])
    with pytest.raises(ValueError, match=message):
        trainer.train(data, 1)
    assert trainer.progress.step == 0
