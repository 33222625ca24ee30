"""Limits of the number of batches, by callback, context or environment."""

from __future__ import annotations

import os
from functools import partial

import pytest
from torch.optim.lr_scheduler import OneCycleLR

from pytorch_accel_lite import TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import LimitBatchesCallback, LimitEvalStepsCallback, StepBasedEvaluationCallback
from pytorch_accel_lite.utils import LimitBatches
from tests.small_models import adamw_trainer, float64_data, float64_model, listener


class Lengths(TrainerCallback):
    def on_training_run_start(self, trainer, **kwargs):
        self.lengths = len(trainer.train_dataloader), len(trainer.eval_dataloader)


@pytest.mark.parametrize("how", ["callback", "context", "variable"])
def test_loaders_end_at_a_limit_of_batches(how, monkeypatch):
    lengths = Lengths()
    if how == "callback":
        trainer = adamw_trainer(float64_model(), callbacks=[LimitBatchesCallback(3), lengths])
    elif how == "variable":
        monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", "3")
        trainer = adamw_trainer(float64_model(), callbacks=[lengths])
    else:
        with LimitBatches(3):
            with LimitBatches(5):
                assert os.environ["PT_ACC_LIMIT_BATCHES"] == "5"
            trainer = adamw_trainer(float64_model(), callbacks=[lengths])
        assert "PT_ACC_LIMIT_BATCHES" not in os.environ
    total = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    trainer.train(
        float64_data(40),
        2,
        float64_data(30),
        per_device_batch_size=4,
        create_scheduler_fn=partial(OneCycleLR, max_lr=0.1, total_steps=total),
    )
    assert lengths.lengths == (3, 3)
    assert trainer.progress.update == trainer.scheduler.last_epoch == trainer.scheduler.total_steps == 6
    assert trainer.progress.samples == 24


@pytest.mark.parametrize(("limit", "of_all", "expected"), [(3, "5", 3), (5, "3", 3)])
def test_the_smallest_of_several_limits_of_batches_counts(limit, of_all, expected, monkeypatch):
    monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", of_all)
    trainer = adamw_trainer(float64_model(), callbacks=[LimitBatchesCallback(limit)])
    trainer.train(float64_data(40), 1, per_device_batch_size=4)
    assert trainer.progress.update == expected


class CountsEvaluationSteps(TrainerCallback):
    """Counts the steps of each evaluation within an epoch (``True``) and after one."""

    def __init__(self) -> None:
        self.steps: dict[bool, list[int]] = {True: [], False: []}

    def on_eval_epoch_start(self, trainer, is_intermediate, **kwargs):
        self.steps[is_intermediate].append(0)
        self.current = self.steps[is_intermediate]

    def on_eval_step_end(self, trainer, **kwargs):
        self.current[-1] += 1


@pytest.mark.parametrize(("only_intermediate", "after_epoch"), [(True, 8), (False, 2)])
def test_an_eval_step_limit_may_also_hold_after_epochs(only_intermediate, after_epoch):
    count, limit = CountsEvaluationSteps(), LimitEvalStepsCallback(2, only_intermediate)
    trainer = adamw_trainer(float64_model(), callbacks=[count, limit, StepBasedEvaluationCallback(1)])
    trainer.train(float64_data(4), 1, float64_data(30), per_device_batch_size=4)
    assert count.steps == {True: [2], False: [after_epoch]}
    assert len(trainer.eval_dataloader) == 8


@pytest.mark.parametrize("limits", [[5, 3], [3, 5], [3, 5, 4]])
@pytest.mark.parametrize(("of_all", "expected"), [(None, (3, 8)), (2, (2, 2)), (6, (3, 6))])
def test_the_smallest_of_several_evaluation_limits_counts(limits, of_all, expected):
    count = CountsEvaluationSteps()
    callbacks = [count, StepBasedEvaluationCallback(1), *map(LimitEvalStepsCallback, limits)]
    callbacks += [] if of_all is None else [LimitBatchesCallback(of_all)]
    trainer = adamw_trainer(float64_model(), callbacks=callbacks)
    trainer.train(float64_data(8), 2, float64_data(30), per_device_batch_size=4)
    assert count.steps == {True: [expected[0]] * 4, False: [expected[1]] * 2}


def test_a_limit_ends_with_an_evaluation_that_fails():
    def evaluate(trainer, **kwargs):
        with pytest.raises(ZeroDivisionError):
            trainer.run_evaluation()

    def fail_within_epochs(trainer, is_intermediate, **kwargs):
        assert not is_intermediate or 1 / 0

    count = CountsEvaluationSteps()
    failing = listener(on_update_end=evaluate, on_eval_epoch_end=fail_within_epochs)
    trainer = adamw_trainer(float64_model(), callbacks=[failing, LimitEvalStepsCallback(1), count])
    trainer.train(float64_data(4), 1, float64_data(12), per_device_batch_size=4)
    assert count.steps == {True: [1], False: [3]}


def test_a_limit_of_evaluations_may_be_extended_in_a_subclass():
    class Mine(LimitEvalStepsCallback):
        def on_eval_epoch_start(self, trainer, is_intermediate=False, **kwargs):
            super().on_eval_epoch_start(trainer, is_intermediate, **kwargs)

        def on_eval_epoch_end(self, trainer, is_intermediate=False, **kwargs):
            super().on_eval_epoch_end(trainer, is_intermediate, **kwargs)

    lengths: list[int] = []
    look = listener(on_eval_step_end=lambda t, **_: lengths.append(len(t.eval_dataloader)))
    callbacks = [Mine(2), look, StepBasedEvaluationCallback(2)]
    adamw_trainer(float64_model(), callbacks=callbacks).train(float64_data(8), 1, float64_data(12), 4)
    assert lengths == [2, 2, 3, 3, 3]


def test_a_bad_limit_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", "many")
    with pytest.raises(ValueError, match="PT_ACC_LIMIT_BATCHES='many'"):
        adamw_trainer(float64_model())


@pytest.mark.parametrize("value", ["", "none", "None"])
def test_a_time_limit_of_none_is_no_limit(value, monkeypatch):
    monkeypatch.setenv("PT_ACC_LIMIT_BATCHES", value)
    lengths = Lengths()
    adamw_trainer(float64_model(), callbacks=[lengths]).train(
        float64_data(40), 1, float64_data(30), per_device_batch_size=4
    )
    assert lengths.lengths == (10, 8)


def test_a_limit_is_at_least_one():
    with pytest.raises(ValueError, match="num_batches=0 must be at least 1"):
        LimitBatchesCallback(0)
    with pytest.raises(ValueError, match="num_eval_steps=-1 must be at least 1"):
        LimitEvalStepsCallback(-1)
