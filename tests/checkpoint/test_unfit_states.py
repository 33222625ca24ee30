"""Training states that do not fit: the error, or a warning, says what."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import DamagedStateError
from tests.scripts.resumable import make_model, run, saved_states
from tests.small_models import (
    adamw_trainer,
    changed_manifest,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_trainer,
    train,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        (True, False, "holds a schedule, but create_scheduler_fn was not passed to train.., so rates stay as set"),
        (False, True, "holds no schedule, so that of create_scheduler_fn starts from the beginning"),
    ],
)
def test_a_run_resumed_with_or_without_its_schedule_warns(first, second, match, tmp_path):
    def run(epochs: int, is_scheduled: bool) -> Trainer:
        decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9) if is_scheduled else None
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path)])
        return train(trainer, epochs, create_scheduler_fn=decay, resume_from="latest")

    run(1, first)
    with pytest.warns(UserWarning, match=match):
        run(2, second)


class RefinedAdam(torch.optim.Adam):
    """A subclass of the user's own, with the state of its base."""


class OtherName(RefinedAdam):
    """The same class under another name, as a decorator may derive it."""


def train_with(make: Any, folder: Path, epochs: int, resume_from: Any = "latest", several: bool = False) -> Trainer:
    model = float64_model(features=4, dtype=torch.float32)
    optimizer = make(model.parameters())
    if several:
        optimizer = {"body": torch.optim.SGD(model[0].parameters(), lr=0.1), "head": make(model[2].parameters())}
    trainer = make_trainer([SaveTrainingStateCallback(folder)], model, optimizer=optimizer)
    return train(trainer, epochs, resume_from=resume_from)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.optim.SGD, torch.optim.Adam),
        (torch.optim.AdamW, torch.optim.Adam),
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.Adam, torch.optim.Adamax),
        (RefinedAdam, torch.optim.AdamW),
        (torch.optim.NAdam, torch.optim.RAdam),
    ],
)
def test_the_state_of_another_class_of_optimizers_is_refused(tmp_path, first, second, several):
    train_with(first, tmp_path, 1, several=several)
    which = "that of group 'head'" if several else "it"
    message = f"The optimizer in .* does not fit the trainer's: {which} was {first.__name__} and is {second.__name__} "
    with pytest.raises(ValueError, match=message):
        train_with(second, tmp_path, 2, several=several)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.optim.Adam, RefinedAdam),
        (RefinedAdam, torch.optim.Adam),
        (RefinedAdam, OtherName),
        (torch.optim.Adam, partial(torch.optim.Adam, fused=True)),
        (partial(torch.optim.Adam, foreach=True), torch.optim.Adam),
        (torch.optim.AdamW, torch.optim.AdamW),
    ],
)
def test_a_state_fits_a_derived_optimizer_class(tmp_path, first, second):
    train_with(first, tmp_path, 1)
    assert train_with(second, tmp_path, 2).progress.update == 6


STEPS = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
COSINE = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=6)


class OwnSteps(torch.optim.lr_scheduler.StepLR):
    """A scheduler of the user's own, with the state of its base."""


def test_the_state_of_another_class_of_schedulers_is_refused(tmp_path):
    def run(epochs: int, schedule: Any) -> Trainer:
        return train(
            make_trainer([SaveTrainingStateCallback(tmp_path)]),
            epochs,
            create_scheduler_fn=schedule,
            resume_from="latest",
        )

    run(1, STEPS)
    with pytest.raises(ValueError, match=r"The scheduler in .* was a StepLR, and is a CosineAnnealingLR now"):
        run(2, COSINE)
    assert run(2, partial(OwnSteps, step_size=2)).progress.epoch == 2


def test_one_scheduler_of_another_class_is_named(tmp_path):
    def run(epochs: int, schedule: Any) -> Trainer:
        model = float64_model(features=4, dtype=torch.float32)
        optimizer = {
            "body": torch.optim.SGD(model[0].parameters(), lr=0.1),
            "head": torch.optim.SGD(model[2].parameters()),
        }
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path)], model, optimizer=optimizer)
        return train(trainer, epochs, create_scheduler_fn={"body": STEPS, "head": schedule}, resume_from="latest")

    run(1, STEPS)
    with pytest.raises(ValueError, match=r"The scheduler 'head' in .* was a StepLR, and is a CosineAnnealingLR now"):
        run(2, COSINE)


@pytest.mark.parametrize("event", ["on_update_end", "on_epoch_checkpoint"])
def test_a_state_cannot_be_loaded_within_a_run(tmp_path, event):
    state = tmp_path / "state"
    make_trainer([]).save_training_state(state)
    rollback = listener(**{event: lambda trainer, **kwargs: trainer.load_training_state(state)})
    with pytest.raises(RuntimeError, match="cannot be called within a run"):
        train(make_trainer([rollback]), 2)


class NewHead(TrainerCallback):
    """Replaces the last layer before training."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        model = trainer.get_model()
        model[2] = torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.Linear(2, 1)).double()
        trainer.optimizer.add_param_group({"params": list(model[2].parameters())})


def test_layers_that_starting_events_add_are_resumed(tmp_path):
    def run(folder: str, resume_from: Path | None = None) -> Trainer:
        torch.manual_seed(1 if resume_from else 0)
        model = float64_model()
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
        saving = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        trainer = Trainer(model, torch.nn.MSELoss(), optimizer, [NewHead(), saving])
        trainer.train(float64_data(24), 2, per_device_batch_size=8, resume_from=resume_from)
        return trainer

    whole = run("whole")
    for update in (2, 3, 5):
        resumed = run(f"again {update}", tmp_path / "whole" / f"update-{update:09d}")
        assert equal_weights(weights(resumed.model), weights(whole.model))


def test_an_attribute_of_another_class_of_optimizers_is_refused(tmp_path):
    class WithCritic(Trainer):
        critic_class = torch.optim.AdamW

        def training_run_start(self):
            self.critic = torch.nn.Linear(1, 1)
            self.critic_optimizer = self.critic_class(self.critic.parameters())

    def run(epochs):
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path)], trainer_class=WithCritic)
        return train(trainer, epochs, resume_from="latest")

    run(1)
    WithCritic.critic_class = torch.optim.Adam
    with pytest.raises(ValueError, match=r"The critic_optimizer in .* does not fit .*: it was AdamW and is Adam now"):
        run(2)


def test_a_state_without_its_optimizers_class_is_resumed(tmp_path):
    train_with(torch.optim.Adam, tmp_path, 1)
    (state,) = tmp_path.glob("update-*")
    shared = torch.load(state / "trainer.pt")
    assert shared.pop("optimizer_classes") == {"optimizer": [["Adam"]]}
    torch.save(shared, state / "trainer.pt")
    with changed_manifest(state, "trainer.pt"):
        pass
    assert train_with(torch.optim.Adam, tmp_path, 2).progress.update == 6


@pytest.fixture
def saved_state(tmp_path):
    """The state of a model of two layers, trained by AdamW."""
    trainer = adamw_trainer(float64_model())
    trainer.train(float64_data(8), 1)
    trainer.save_training_state(tmp_path / "state")
    return tmp_path / "state"


def test_a_state_of_another_model_is_refused(saved_state):
    with pytest.raises(ValueError, match=r"does not fit the model Linear: missing in the checkpoint: bias, weight"):
        adamw_trainer(torch.nn.Linear(5, 1)).load_training_state(saved_state)


def test_a_state_of_an_optimizer_of_other_parameters_is_refused(saved_state):
    model = float64_model()
    other = torch.optim.AdamW([model[0].weight], lr=0.1)
    with pytest.raises(ValueError, match=r"The optimizer in '.*' does not fit the trainer's AdamW"):
        adamw_trainer(model, optimizer=other).load_training_state(saved_state)


def test_a_state_of_a_newer_format_is_refused(saved_state):
    with changed_manifest(saved_state) as manifest:
        manifest["format_version"] = 99
    with pytest.raises(ValueError, match=r"has format 99; this version .* Upgrade pytorch_accel_lite"):
        adamw_trainer(float64_model()).load_training_state(saved_state)


def test_a_path_without_a_training_state_is_an_error(tmp_path):
    trainer = adamw_trainer(float64_model())
    with pytest.raises(FileNotFoundError, match="There is no training state at"):
        trainer.load_training_state(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DamagedStateError, match=r"is not a training state: it has no manifest\.json"):
        trainer.load_training_state(tmp_path / "empty")


def test_resuming_from_the_latest_state_needs_the_callback():
    with pytest.raises(ValueError, match="resume_from='latest' needs a SaveTrainingStateCallback"):
        adamw_trainer(float64_model()).train(float64_data(8), 1, resume_from="latest")


def test_removed_and_added_callbacks_are_named(tmp_path):
    run(tmp_path, max_checkpoints=1)

    class Other(TrainerCallback):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise AssertionError

    (state,) = saved_states(tmp_path)
    trainer = adamw_trainer(make_model(), callbacks=[Other])
    with (
        pytest.warns(UserWarning, match="no longer exists"),
        pytest.warns(UserWarning, match="nothing for the callback 'Other'"),
        pytest.warns(UserWarning, match="state of callback 'EarlyStoppingCallback', which no longer exists"),
    ):
        trainer.load_training_state(state)


def test_a_state_with_an_unfit_attribute_loads_nothing(tmp_path):
    def create(width: int) -> Trainer:
        trainer = make_trainer()
        trainer.critic = torch.nn.Linear(1, width)
        trainer.critic_optimizer = torch.optim.SGD(trainer.critic.parameters())
        return trainer

    saved = train(create(2))
    saved.save_training_state(tmp_path / "state")
    trainer = create(3)
    before = weights(trainer.model)
    with pytest.raises(ValueError, match=r"The critic in .* does not fit"):
        trainer.load_training_state(tmp_path / "state")
    assert equal_weights(weights(trainer.model), before)
    assert trainer.progress.update == 0


def test_an_error_of_a_callback_that_loads_is_named(tmp_path):
    class Counts(TrainerCallback):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.count = state["count"]

    train(make_trainer([Counts(), SaveTrainingStateCallback(tmp_path)]))
    with pytest.raises(KeyError, match="count") as caught:
        train(make_trainer([Counts(), SaveTrainingStateCallback(tmp_path)]), epochs=2, resume_from="latest")
    assert "In loading the state of the callback 'Counts'." in caught.value.__notes__
