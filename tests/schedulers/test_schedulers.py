"""Schedules by name, the base classes of schedules, schedules after epochs, or of a metric."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.extending import SCHEDULE_RECREATION
from pytorch_accel_lite.schedulers import SchedulerBase, StatefulSchedulerBase
from pytorch_accel_lite.schedulers.schedule_arguments import NAMED_SCHEDULES
from tests.launching import some_of
from tests.schedules import check_refused_before_training, make_optimizer, run, saved_run
from tests.scripts.resumable import CopyStates
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_model,
    make_trainer,
    train,
    weights,
)

P = TrainerPlaceholderValues


# ------------------------------------------------------------------------------------------------ by name


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"create_scheduler_fn": "cosin"},
            ValueError,
            "='cosin' is not the name of a schedule. Did you mean 'cosine'?",
        ),
        ({"create_scheduler_fn": "cosine_with_warmup"}, ValueError, "Did you mean 'cosine'?"),
        (
            {"create_scheduler_fn": "StepLR"},
            ValueError,
            r"pass a function such as functools.partial\(StepLR, step_size",
        ),
        ({"warmup_steps": 5}, ValueError, "warmup_steps=5 is for schedules by name, .* Pass 'constant', or"),
        ({"create_scheduler_fn": StepLR, "warmup_steps": 5}, ValueError, "Give your own scheduler its warm-up"),
    ],
)
def test_invalid_schedule_names_and_warm_ups_are_named(arguments, error, message):
    check_refused_before_training(arguments, error, message)


def test_without_its_extension_a_name_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(NAMED_SCHEDULES, "content", None)
    with pytest.raises(
        ValueError, match="create_scheduler_fn='cosine' belongs to the extension 'named_schedules', which is not"
    ):
        adamw_trainer(make_model()).train(make_data(6), 1, create_scheduler_fn="cosine")


# ------------------------------------------------------------------------------------ the base classes


class Halving(StatefulSchedulerBase):
    def get_updated_values(self, num_updates):
        return [value / 2**num_updates for value in self.base_lr_values]


def test_a_custom_schedule_is_stepped_and_kept_in_states(tmp_path):
    trainer = run(Halving, epochs=1)
    assert trainer.noting.rates == [0.1, 0.05, 0.025]
    trainer.save_training_state(tmp_path / "state")
    scheduler = Halving(make_optimizer(1.0))
    scheduler.load_state_dict(trainer.scheduler.state_dict())
    scheduler.step()
    assert scheduler.num_updates == 4
    assert scheduler.get_last_lr() == [0.1 / 16]


def test_scheduler_values_may_be_single_per_group_or_none():
    class Chosen(SchedulerBase):
        values: Any = None

        def get_updated_values(self, num_updates):
            return self.values

    optimizer = make_optimizer(momentum=0.9)
    scheduler = Chosen(optimizer, "momentum")
    for values, expected in ((None, [0.9, 0.9]), (0.5, [0.5, 0.5]), ((0.1, 0.2), [0.1, 0.2])):
        scheduler.values = values
        scheduler.step_update(3)
        assert scheduler.get_last_lr() == expected
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    assert optimizer.param_groups[0]["initial_momentum"] == 0.9
    scheduler.values = [1.0]
    with pytest.raises(ValueError, match="returned 1 values for 2 parameter groups"):
        scheduler.step_update(3)


# ------------------------------------------------------------------------------------------ states


def test_a_schedule_for_other_epochs_needs_an_extension(tmp_path, monkeypatch):
    monkeypatch.setattr(SCHEDULE_RECREATION, "content", None)
    factory = partial(StepLR, step_size=2)
    saved_run(tmp_path, factory, epochs=1)
    with pytest.raises(
        ValueError, match=r"^Resuming a schedule with 2 updates in an epoch instead of 3 belongs to the"
    ):
        run(factory, resume_from=tmp_path / "states" / "update-000000002", per_device_batch_size=4)


# ----------------------------------------------------------------------------------------- bad input


def test_an_optimizer_that_does_not_fit_is_explained():
    with pytest.raises(TypeError, match="must be an instance of torch"):
        Halving(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"param_group_field='betas' is not in the optimizer's .* 'momentum'"):
        Halving(make_optimizer(), "betas")


# --------------------------------------------------------------------------------- after epochs, on a metric


@pytest.mark.parametrize("event", ["on_training_run_start", "on_train_epoch_end"])
def test_an_optimizer_replaced_within_a_run_needs_a_schedule(event, recwarn):
    def replace(trainer: Trainer, **_: Any) -> None:
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
        if with_schedule:
            trainer.scheduler = StepLR(trainer.optimizer, 2)

    def run_of_two_epochs() -> Trainer:
        trainer = make_trainer([listener(**{event: replace})])
        return train(trainer, epochs=2, create_scheduler_fn=partial(StepLR, step_size=2))

    with_schedule = True
    assert run_of_two_epochs().scheduler.optimizer.defaults["momentum"] == 0.9
    assert not list(recwarn)
    with_schedule = False
    with pytest.warns(UserWarning, match="but the StepLR still sets the rates of the one before. Assign trainer.sched"):
        run_of_two_epochs()


def test_a_scheduler_may_be_stepped_after_epochs():
    trainer = run(
        partial(StepLR, step_size=1, gamma=0.5), scheduler_interval="epoch", eval_dataset=make_data(4), epochs=3
    )
    assert trainer.noting.rates == [0.1] * 3 + [0.05] * 3 + [0.025] * 3
    assert trainer.scheduler.last_epoch == 3
    assert trainer.run_config.scheduler_interval == "epoch"


def test_placeholders_are_resolved_for_a_scheduler_of_epochs():
    trainer = run(partial(CosineAnnealingLR, T_max=P.NUM_EPOCHS), scheduler_interval="epoch", epochs=2)
    assert trainer.noting.rates == pytest.approx([0.1] * 3 + [0.05] * 3)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0)


class ScoresOfAScript(TrainerCallback):
    """Records a score at the end of each evaluation, and notes the rate at the end of each epoch."""

    scores = (5.0, 3.0, 4.0, 3.5, 1.0, 2.0)

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_eval_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric("score", self.scores[trainer.progress.epoch - 1])

    def on_training_run_epoch_end(self, trainer, **kwargs):
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])


EVAL_LOSS = "eval_loss_epoch"
PLATEAU: dict[str, Any] = {
    "factory": partial(ReduceLROnPlateau, factor=0.5, patience=0),
    "scheduler_interval": "epoch",
    "eval_dataset": make_data(4),
    "epochs": 6,
}


def test_a_plateau_scheduler_gets_the_metric_of_each_evaluation():
    scores = ScoresOfAScript()
    run(PLATEAU["factory"], scores, scheduler_metric="score", **{k: v for k, v in PLATEAU.items() if k != "factory"})
    assert scores.rates == [0.1, 0.1, 0.05, 0.025, 0.025, 0.0125]


def test_an_unrecorded_metric_is_an_error_that_lists_the_others():
    error = pytest.raises(ValueError, match=r"scheduler_metric='eval_los_epoch'.*'eval_loss_epoch'.*train_loss_epoch")
    with pytest.warns(UserWarning, match=r"unless Noting does. Did you mean 'eval_loss_epoch'\?"), error:
        run(**PLATEAU, scheduler_metric="eval_los_epoch")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "stepping",
    some_of(
        [
            {
                **PLATEAU,
                "factory": partial(ReduceLROnPlateau, threshold=0.2, patience=0),
                "scheduler_metric": EVAL_LOSS,
            },
            {**PLATEAU, "factory": partial(StepLR, step_size=1, gamma=0.5)},
        ]
    ),
)
def test_a_schedule_stepped_after_epochs_resumes_its_bits(tmp_path, stepping):
    def train(folder, *callbacks, resume_from=None):
        saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, save_every_n_epochs=1)
        return run(stepping["factory"], saving, *callbacks, resume_from=resume_from, **options)

    options = {name: value for name, value in stepping.items() if name != "factory"}
    whole = train(tmp_path, CopyStates(tmp_path))
    copies = sorted((tmp_path / "copies").glob("*/update-*"))
    assert len(copies) == 18 + 6  # after updates, and after epochs
    assert len(set(whole.noting.rates)) > 1
    for copy in some_of(copies):
        resumed = train(tmp_path / copy.parent.name, resume_from=copy)
        assert resumed.noting.rates == whole.noting.rates[18 - len(resumed.noting.rates) :]
        assert equal_weights(weights(resumed.model), weights(whole.model))
        assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
        assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_resuming_before_the_first_schedule_step_is_no_mistake(tmp_path):
    schedule, options = partial(StepLR, step_size=1), {"scheduler_interval": "epoch", "epochs": 1}
    saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1, save_at_end=False)
    run(schedule, saving, **options)
    assert (
        run(schedule, resume_from=tmp_path / "update-000000003", **options).scheduler.last_epoch == 1
    )  # no warning of torch


def test_a_schedule_of_a_metric_steps_when_it_was_measured():
    model = float64_model()
    trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []

    class Follows(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            seen.append(metrics)
            super().step(metrics, epoch)

    trainer.train(
        float64_data(16),
        5,
        float64_data(9),
        create_scheduler_fn=Follows,
        scheduler_interval="epoch",
        scheduler_metric="eval_loss_epoch",
        eval_every_n_epochs=2,
    )
    assert seen == trainer.run_history.get_metric_values("eval_loss_epoch")
    assert len(seen) == 3
