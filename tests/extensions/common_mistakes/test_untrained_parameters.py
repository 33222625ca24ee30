"""Warnings about optimizers of other parameters than those of the model, the loss function and other parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.small_models import adamw_trainer, float64_data, float64_model, listener, make_model, make_trainer, train


def test_an_optimizer_of_another_model_is_warned_of():
    forgotten = torch.optim.SGD(make_model(1).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"None of the 4 parameters of the optimizer belongs to the model.*recreate"):
        train(make_trainer(optimizer=forgotten))


def test_a_head_that_is_newer_than_the_optimizer_is_warned_of():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2] = nn.Linear(8, 1)
    match = r"No optimizer has the model's 2\.weight, 2\.bias, .* has 2 parameters that are in no module"
    with pytest.warns(UserWarning, match=match):
        train(make_trainer(model=model, optimizer=optimizer))


def test_a_head_that_is_trained_with_a_critic_is_fine(recwarn):
    model, critic = make_model(), nn.Linear(1, 1)
    trainer = make_trainer(
        model=model, optimizer=torch.optim.SGD([*model[2].parameters(), *critic.parameters()], lr=0.1)
    )
    trainer.parts = {"critic": [*critic.parameters(), nn.Parameter(torch.ones(()))]}
    trainer.optimizer.add_param_group({"params": trainer.parts["critic"][2:]})
    train(trainer)
    assert not list(recwarn)


def test_adapters_newer_than_the_optimizer_are_warned_of():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    model.insert(2, nn.Linear(8, 8))
    match = r"No optimizer has the model's 2\.weight, 2\.bias, .* has only parameters that are frozen"
    with pytest.warns(UserWarning, match=match):
        train(make_trainer(model=model, optimizer=optimizer))


@pytest.mark.parametrize("event", ["on_training_run_start", "on_train_epoch_start", "on_train_epoch_end"])
def test_a_model_replaced_within_a_run_needs_an_optimizer(event, recwarn):
    def replace(trainer, **_):
        trainer.model = make_model(1)
        if with_optimizer:
            trainer.optimizer = SGD(trainer.model.parameters(), lr=0.1)

    with_optimizer = True
    train(make_trainer([listener(**{event: replace})]), epochs=2)
    assert not list(recwarn)
    with_optimizer = False
    with pytest.warns(UserWarning, match=r"None of the 4 parameters of the optimizer belongs to the model.*recreate"):
        train(make_trainer([listener(**{event: replace})]), epochs=2)


def test_an_optimizer_of_the_loss_functions_parameters_is_fine(recwarn):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (self.scale * outputs - targets).pow(2).mean()

    loss_func = Scaled()
    train(make_trainer(loss_func=loss_func, optimizer=torch.optim.SGD(loss_func.parameters(), lr=0.1)))
    assert not list(recwarn)
    assert loss_func.scale != 1


def test_an_optimizer_of_other_parameters_warns_at_the_call():
    trainer = adamw_trainer(float64_model(), optimizer=lambda parameters: SGD([torch.zeros(1)], lr=0.1))
    with pytest.warns(UserWarning, match="None of the 1 parameters of the optimizer belongs to the model") as caught:
        trainer.train(float64_data(6), 1)
    assert caught[0].filename == __file__
