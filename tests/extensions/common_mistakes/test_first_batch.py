"""Checks of the first batch: losses that are sums, and unused targets."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from tests.shared_trainings import SPLITTING
from tests.small_models import listener, make_data, make_trainer, train, warnings_of

SUM = "but the trainer takes a loss for a mean"


def warned(trainer: Trainer, **kwargs: Any) -> list[str]:
    """Train for two epochs, and return the warnings, each of which must point to this file."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(trainer, epochs=2, **kwargs)
    assert all(each.filename == train.__code__.co_filename for each in said)
    return [str(each.message) for each in said]


def classes(size: int = 6) -> TensorDataset:
    return TensorDataset(make_data(size).tensors[0], torch.arange(size) % 3)


@pytest.mark.parametrize(
    "loss_func", [nn.MSELoss(reduction="sum"), partial(functional.l1_loss, reduction="sum")], ids=["module", "partial"]
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_loss_with_reduction_sum_is_known_before_any_update(loss_func):
    trainer = make_trainer(loss_func=loss_func)
    with pytest.raises(UserWarning, match=f"loss_func has reduction='sum', {SUM}"):
        train(trainer)
    assert not trainer.progress.update
    assert len(warned(trainer)) == 1


SUMS = {
    "squares": lambda o, t: ((o - t) ** 2).sum(),
    "of features first": lambda o, t: (o - t).abs().sum(1).sum(),
    "of each": lambda o, t: functional.mse_loss(o, t, reduction="none").sum(),
}
MEANS = {
    "mean": lambda o, t: ((o - t) ** 2).mean(),
    "features added": lambda o, t: ((o - t) ** 2).sum(1).mean(),
    "samples averaged first": lambda o, t: ((o - t) ** 2).mean(0).sum(),
    "divided": lambda o, t: ((o - t) ** 2).sum() / len(o),
    "divided first": lambda o, t: ((o - t) ** 2 / len(o)).sum(),
    "weighed": lambda o, t: ((o - t).square() * torch.full((len(o), 1), 1 / len(o))).sum(),
    "scaled": lambda o, t: functional.mse_loss(o, t, reduction="sum") * (1 / len(o)),
}


@pytest.mark.parametrize("loss_func", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("kwargs", [{}, {"gradient_accumulation_steps": 2}, SPLITTING])
def test_a_loss_written_as_a_sum_is_warned_of_in_the_first_batch(loss_func, kwargs):
    (text,) = warned(make_trainer(loss_func=loss_func), **kwargs)
    assert text.startswith(f"The loss adds up the samples of a batch, {SUM}")


@pytest.mark.parametrize("loss_func", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_mean_loss_is_not_warned_of(loss_func, batch_size):
    assert not warned(make_trainer(loss_func=loss_func), batch_size=batch_size)


class Custom(Trainer):
    """Divides a summed loss by the batch size if ``divides``."""

    divides = True

    def calculate_train_batch_loss(self, batch):
        loss = self.loss_func(self.model(batch[0]), batch[1])
        return {"loss": loss / len(batch[0]) if self.divides else loss}


@pytest.mark.parametrize("divides", [True, False])
def test_an_own_step_that_divides_its_loss_is_not_warned_of(divides):
    trainer = make_trainer(trainer_class=Custom, loss_func=nn.MSELoss(reduction="sum"))
    trainer.divides = divides
    assert len(warned(trainer, size=16, batch_size=8)) == (not divides)


def warnings_of_a_sum() -> list[str]:
    """The warnings of a process about a loss that is a sum."""
    return warnings_of(make_trainer(loss_func=nn.MSELoss(reduction="sum")), make_data(8))


def test_a_loss_summed_over_classes_is_reported_by_rank_0(two_ranks):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = lambda o, t: functional.cross_entropy(o, t, reduction="sum")  # noqa: E731
    assert len(warned(make_trainer(model=model, loss_func=loss, optimizer=optimizer), train_dataset=classes())) == 1
    first, second = two_ranks(warnings_of_a_sum)
    assert len(first) == 1
    assert SUM in first[0]
    assert not second


# ------------------------------------------------------------------------------- three elements


X, Y = make_data(6).tensors
THIRD = "but the third looks like the target"


def trainer_of_three(model: nn.Module, *callbacks: Any, trainer_class: type[Trainer] = Trainer) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return make_trainer(callbacks, model, trainer_class, optimizer=optimizer)


@pytest.mark.parametrize(
    ("model", "aux", "target"),
    [(nn.Linear(4, 1), Y + 1, Y), (nn.Linear(4, 3), Y, Y.expand(6, 3))],
    ids=["like a target", "of the shape of the outputs alone"],
)
def test_an_unused_third_target_is_warned_of_once(model, aux, target):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(trainer_of_three(model), epochs=2, train_dataset=TensorDataset(X, aux, target))
    assert [THIRD in str(each.message) for each in said if "size" not in str(each.message)] == [True]  # torch has one


def with_classes() -> Trainer:
    trainer = trainer_of_three(nn.Linear(4, 3))
    trainer.loss_func = nn.CrossEntropyLoss()
    return trainer


class UsesThird(Trainer):
    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        return output | {"loss": output["loss"] + batch[2].mean()}


@pytest.mark.parametrize(
    ("third", "trainer"),
    {
        "indices": (torch.arange(6), lambda: trainer_of_three(nn.Linear(4, 1))),
        "weights": (Y.abs(), lambda: trainer_of_three(nn.Linear(4, 1))),
        "one for each output beside a label": (torch.randn(6, 3), lambda: with_classes()),
        "a mask": (Y > 0, lambda: trainer_of_three(nn.Linear(4, 1))),
        "one for each sample": (Y[:, 0], lambda: trainer_of_three(nn.Linear(4, 1))),
        "used by a callback": (
            Y,
            lambda: trainer_of_three(nn.Linear(4, 1), listener(on_train_step_end=lambda t, batch, **_: batch[2])),
        ),
        "used by a step": (Y, lambda: trainer_of_three(nn.Linear(4, 1), trainer_class=UsesThird)),
    }.values(),
)
def test_a_third_element_that_is_no_target_is_not_warned_of(third, trainer):
    made = trainer()
    second = classes().tensors[1] if isinstance(made.loss_func, nn.CrossEntropyLoss) else Y
    train(made, train_dataset=TensorDataset(X, second, third))  # a warning would be an error
    assert made.progress.epochs_completed


# ------------------------------------------------------------------------------- no loss for evaluations


class OwnTrainingLoss(Trainer):
    def calculate_train_batch_loss(self, batch):
        outputs = self.model(batch[0])
        return {"loss": functional.mse_loss(outputs, batch[1]), "model_outputs": outputs}


class OwnLosses(OwnTrainingLoss):
    def calculate_eval_batch_loss(self, batch):
        return self.calculate_train_batch_loss(batch)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_loss_for_training_only_is_warned_of_before_an_epoch():
    trainer = make_trainer(trainer_class=OwnTrainingLoss, loss_func=None)
    with pytest.raises(UserWarning, match=r"The evaluation has no loss: .* Override it, too"):
        train(trainer, eval_dataset=classes(), sanity_check=False)
    assert not trainer.progress.update
    for right in (
        make_trainer(trainer_class=OwnLosses, loss_func=None),
        make_trainer(trainer_class=OwnTrainingLoss, loss_func=nn.MSELoss()),
    ):
        train(right, eval_dataset=TensorDataset(X, Y))
        assert right.progress.epochs_completed == 1
    train(make_trainer(trainer_class=OwnTrainingLoss, loss_func=None))  # is not evaluated


@pytest.mark.parametrize(("name", "count"), [("num_items", 1), ("num_items_in_batch", 0), ("num_words", 0)])
def test_a_number_of_items_under_the_name_of_update_is_warned_of(name, count):
    class Counts(Trainer):
        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss(batch) | {name: 3}

    found = warned(make_trainer(trainer_class=Counts))
    assert len([each for each in found if "Return it as num_items_in_batch" in each]) == len(found) == count
