"""Modes of the model and of torch that callbacks and overridden steps leave changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from tests.small_models import adamw_trainer, equal_weights, listener, make_data, make_trainer, train, weights


@pytest.fixture(autouse=True)
def _restore_modes_of_torch() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(dtype)


def model_with_dropout() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    model[1].eval()  # until the first epoch
    return model


class KeepsNormFixed(Trainer):
    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        self.model[1].eval()


def trained(*callbacks: Any, trainer_class: type[Trainer] = KeepsNormFixed, **kwargs: Any) -> Any:
    """Train for two epochs of three steps, with evaluations; return the weights and the losses."""
    model = model_with_dropout()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = trainer_class(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=4)
    trainer.train(make_data(12), 2, make_data(12), per_device_batch_size=4, **kwargs)
    losses = {name: trainer.run_history.get_metric_values(name) for name in trainer.run_history.get_metric_names()}
    return weights(model), losses


def once(event: str, action: Callable[[Trainer], Any]) -> Any:
    """A callback that acts the first time that an event fires."""
    actions = [action]
    return listener(**{event: lambda trainer, **kwargs: actions.pop()(trainer) if actions else None})


def to_evaluation(trainer: Trainer) -> None:
    trainer.model.eval()


def to_training(trainer: Trainer) -> None:
    trainer.model.train()


IN_STEPS = [
    *("on_train_step_end", "on_update_end", "on_train_step_checkpoint"),
    *("on_optimizer_step_start", "on_optimizer_step_end", "on_backward_end"),
]


@pytest.mark.sampled
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("event", IN_STEPS)
def test_evaluation_mode_left_by_a_step_ends_with_it(event, accumulation):
    kwargs = {"gradient_accumulation_steps": accumulation}
    with pytest.warns(UserWarning, match="Listener left the model in evaluation mode") as seen:
        left, losses = trained(once(event, to_evaluation), **kwargs)
    plain, plain_losses = trained(**kwargs)
    assert equal_weights(left, plain)
    assert losses == plain_losses
    assert len(seen) == 1


@pytest.mark.parametrize("event", ["on_eval_step_start", "on_eval_step_end"])
def test_training_mode_left_in_an_evaluation_ends_with_its_batch(event):
    modes: list[bool] = []
    note = listener(on_eval_step_end=lambda trainer, **kwargs: modes.append(trainer.model.training))
    with pytest.warns(UserWarning, match="left the model in training mode during evaluation"):
        trained(note, once(event, to_training))
    assert modes == [event == "on_eval_step_start"] + [False] * 5


def test_training_mode_left_in_a_prediction_ends_with_its_batch():
    data, trainer = make_data(12), adamw_trainer(model_with_dropout())
    expected = trainer.predict(data, 4)
    trainer.callback_handler.add_callback(listener(on_predict_step_end=lambda trainer, **kwargs: trainer.model.train()))
    with pytest.warns(UserWarning, match="left the model in training mode during prediction"):
        assert torch.equal(trainer.predict(data, 4), expected)


def test_an_overridden_step_that_leaves_evaluation_mode_is_named():
    class PseudoLabels(Trainer):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            self.model.eval()

    with pytest.warns(UserWarning, match="PseudoLabels left the model in evaluation mode") as seen:
        left, _ = trained(trainer_class=PseudoLabels)
    assert equal_weights(left, trained(trainer_class=Trainer)[0])
    assert len(seen) == 2  # one in each epoch


@pytest.mark.parametrize(
    ("event", "action", "phase"),
    [("on_train_epoch_start", to_evaluation, "training"), ("on_eval_epoch_start", to_training, "evaluation")],
)
def test_a_mode_set_before_an_epoch_stays_with_a_warning(event, action, phase):
    modes: list[bool] = []
    of_steps = {"training": "on_train_step_end", "evaluation": "on_eval_step_end"}[phase]
    note = listener(**{of_steps: lambda trainer, **kwargs: modes.append(trainer.model.training)})
    with pytest.warns(UserWarning, match=f"Listener.{event} left the model in .* so this {phase}"):
        trained(once(event, action), note)
    assert modes == [phase == "evaluation"] * 3 + [phase == "training"] * 3


def test_intended_modes_stay_without_a_warning(recwarn):
    class Meant(Trainer):
        def train_epoch_start(self) -> None:
            self.model.eval()

        def eval_epoch_start(self) -> None:
            self.model.train()

    modes: list[bool] = []
    note = {"on_train_step_end": lambda trainer, **kwargs: modes.append(trainer.model.training)}
    trained(listener(**note), once("on_train_step_end", lambda trainer: trainer.run_evaluation()), trainer_class=Meant)
    assert modes == [False] * 6
    trained(once("on_train_step_end", lambda trainer: trainer.model[2].eval()))  # a part, for good
    assert not recwarn


@pytest.mark.parametrize("event", ["on_train_step_end", "on_train_epoch_end", "on_training_run_epoch_end"])
def test_gradients_left_disabled_are_enabled_again(event):
    plain, _ = trained()
    with pytest.warns(UserWarning, match="left gradients disabled"):
        left, _ = trained(once(event, lambda trainer: torch.set_grad_enabled(False)))
    assert equal_weights(left, plain)


def test_disabled_gradients_are_named_in_the_error():
    with torch.no_grad(), pytest.raises(ValueError, match="because they are disabled"):
        trained()


def test_autocast_left_enabled_is_reported_immediately():
    context = torch.autocast("cpu", torch.bfloat16)
    try:
        with pytest.warns(UserWarning, match="Listener left autocast on") as seen:
            trained(once("on_train_step_end", lambda trainer: context.__enter__()), trainer_class=Trainer)
    finally:
        context.__exit__(None, None, None)
    assert len(seen) == 1


def test_a_changed_default_dtype_is_reported_immediately():
    with pytest.warns(UserWarning, match=r"Listener left torch.float64 as the default dtype"):
        trained(once("on_update_end", lambda trainer: torch.set_default_dtype(torch.float64)), trainer_class=Trainer)


def test_a_run_starts_with_the_modes_that_its_callbacks_set(recwarn):
    trained(once("on_training_run_start", lambda trainer: torch.set_default_dtype(torch.float64)))
    assert not recwarn


def test_a_model_may_override_how_its_mode_changes():
    class Freezes(nn.Linear):
        def train(self, mode=True):
            return super().train(False)

    trainer = train(make_trainer(model=Freezes(4, 1)), eval_dataset=True)
    assert not trainer.get_model().training
