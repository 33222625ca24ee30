"""Gradients recomputed within an update: LBFGS and SAM."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer, callbacks
from tests.launching import some_of
from tests.ranks import check_processes, every_state, final_weights, world_size
from tests.shared_trainings import Contrastive, both_ways
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    largest_difference,
    listener,
    weights,
)

DATA = float64_data(26)


class SAM(Trainer):
    """Updates by the gradients at the worst point nearby (Foret et al., arXiv:2010.01412)."""

    def optimizer_step(self) -> None:
        ascend(list(self.model.parameters()), self.recompute_gradients)
        super().optimizer_step()


class ContrastiveSAM(Contrastive, SAM):
    """With a loss over the samples of all processes."""


def ascend(parameters: list[nn.Parameter], recompute: Callable[[], Any]) -> None:
    """Recompute the gradients where the loss is greater."""
    gradients = [p.grad for p in parameters]
    step = torch._foreach_mul(gradients, 0.05 / torch.nn.utils.get_total_norm(gradients))
    with torch.no_grad():
        torch._foreach_add_(parameters, step)
    recompute()
    with torch.no_grad():
        torch._foreach_sub_(parameters, step)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


SCHEMES: dict[str, tuple[type[Trainer], Any, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "lbfgs": (Trainer, nn.MSELoss(), lbfgs),
    "sam": (SAM, nn.MSELoss(), sgd),
    "contrastive": (ContrastiveSAM, both_ways, sgd),
}


def train_by(scheme: str, folder: Path | None = None, **kwargs: Any) -> Trainer:
    """Train with windows of two batches, the last of which are smaller."""
    model = float64_model()
    trainer_class, loss_func, make = SCHEMES[scheme]
    trainer = trainer_class(model, loss_func, make(model), callbacks=every_state(folder), seed=0)
    trainer.train(DATA, 2, per_device_batch_size=4 // world_size(), gradient_accumulation_steps=2, **kwargs)
    return trainer


IN_ORDER = {"train_dataloader_kwargs": {"shuffle": False}}


def noisy_model() -> nn.Module:
    """A model with dropout and batch norm."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


def seeded(trainer: Trainer) -> None:
    torch.manual_seed(100 + trainer.progress.step)


class Window:
    """By hand: the gradients of a window of batches, each with random numbers of its own."""

    def __init__(self, model: nn.Module, optimizer: Any, batches: list[Any], first: int, clip: float | None) -> None:
        self.model, self.optimizer, self.batches, self.first, self.clip = model, optimizer, batches, first, clip

    def __call__(self) -> torch.Tensor:
        size = sum(len(x) for x, _ in self.batches)
        self.optimizer.zero_grad()
        losses = []
        for number, (x, y) in enumerate(self.batches, self.first):
            torch.manual_seed(100 + number)
            loss = nn.functional.mse_loss(self.model(x), y)
            loss = loss if len(self.batches) == 1 else loss * (len(x) / size)
            loss.backward()
            losses.append(loss.detach())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return sum(losses)

    def again(self) -> torch.Tensor:
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        with torch.enable_grad():
            loss = self()
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(value)
        return loss


def by_hand(scheme: str, make: Callable[..., Any], accumulation: int = 1, clip: float | None = None) -> nn.Module:
    model = noisy_model()
    optimizer = make(model)
    batches = list(DataLoader(DATA, 6))
    for _ in range(2):
        for first in range(0, len(batches), accumulation):
            window = Window(model, optimizer, batches[first : first + accumulation], first, clip)
            window()
            if scheme == "sam":
                ascend(list(model.parameters()), window.again)
                optimizer.step()
            else:
                optimizer.step(window.again)
            optimizer.zero_grad()
    return model


def trained(scheme: str, make: Callable[..., Any], callbacks: Any = (), **kwargs: Any) -> Trainer:
    model = noisy_model()
    trainer_class = SCHEMES[scheme][0]
    callbacks = [listener(on_train_step_start=seeded), *callbacks]
    trainer = trainer_class(model, nn.MSELoss(), make(model), callbacks=callbacks)
    trainer.train(DATA, 2, per_device_batch_size=6, **IN_ORDER, **kwargs)
    return trainer


def wolfe(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")


# ------------------------------------------------------------------------------------------- as by hand


@pytest.mark.parametrize(("scheme", "make"), [("lbfgs", lbfgs), ("lbfgs", wolfe), ("sam", sgd)])
def test_dropout_of_closures_has_the_bits_of_the_loop_by_hand(scheme, make):
    trainer = trained(scheme, make)
    assert torch.equal(torch.get_rng_state(), state_after_one_pass())
    assert equal_weights(weights(trainer.model), weights(by_hand(scheme, make)))
    assert trainer.progress.update == 10


def state_after_one_pass() -> torch.Tensor:
    """The state of the generator after dropout has drawn for the last batch, once."""
    model = noisy_model()
    torch.manual_seed(104)
    model(DATA.tensors[0][24:])
    return torch.get_rng_state()


@pytest.mark.parametrize("scheme", ["lbfgs", "sam"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_windows_are_weighed_and_clipped_as_the_first_time(scheme, clip):
    make = SCHEMES[scheme][2]
    trainer = trained(scheme, make, gradient_accumulation_steps=2, gradient_clip_norm=clip)
    assert largest_difference(weights(trainer.model), weights(by_hand(scheme, make, 2, clip))) < 1e-9


def weights_and_losses(trainer: Trainer) -> dict[str, torch.Tensor]:
    losses = trainer.run_history.get_metric_values("train_loss_epoch")
    return final_weights(trainer) | {"losses": torch.tensor(losses, dtype=torch.float64)}


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.parametrize("scheme", some_of(SCHEMES))
def test_processes_train_as_one_and_resume_to_the_same_bits(two_ranks, scheme):
    check_processes(two_ranks, functools.partial(train_by, scheme), weights_and_losses)


class Counting(Trainer):
    """Weighs each batch by a number of items, of which a filler batch has none."""

    def calculate_train_batch_loss(self, batch):
        return {**super().calculate_train_batch_loss(batch), "num_items_in_batch": torch.tensor(len(batch[1]))}


def train_counting(folder: Path | None = None) -> Trainer:
    model = float64_model().float()
    data = [(x.float(), y.float()) for x, y in DATA][:9]
    trainer = Counting(model, nn.MSELoss(), lbfgs(model), callbacks=every_state(folder), seed=0)
    trainer.train(data, 1, per_device_batch_size=8 // world_size())
    return trainer


def test_processes_without_samples_take_part_in_closures(two_ranks):
    alone = weights(train_counting().model)
    for found in two_ranks.run(counting_weights):
        assert largest_difference(found, alone) < 1e-5


def counting_weights() -> dict[str, torch.Tensor]:
    return final_weights(train_counting())


# ------------------------------------------------------------------------------------------- what it returns and leaves


class Looks(Trainer):
    """Recomputes without changing anything."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        self.log("mean", output["loss"])
        return output

    def optimizer_step(self):
        before = [parameter.grad.clone() for parameter in self.model.parameters()]
        loss = self.recompute_gradients()
        assert not loss.requires_grad
        self.found = [*getattr(self, "found", []), loss.item()]
        assert all(map(torch.equal, before, (parameter.grad for parameter in self.model.parameters())))
        super().optimizer_step()


@pytest.mark.extension("monitoring")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_recomputing_without_a_change_returns_the_windows_loss(accumulation):
    found = {}
    for trainer_class in (Trainer, Looks):
        model = noisy_model()
        trainer = trainer_class(model, nn.MSELoss(), sgd(model), callbacks=[callbacks.GradientNormCallback], seed=1)
        trainer.train(DATA, 1, per_device_batch_size=6, gradient_accumulation_steps=accumulation, **IN_ORDER)
        found[trainer_class] = weights(model), trainer.run_history
    assert equal_weights(found[Trainer][0], found[Looks][0])
    history = found[Looks][1]
    for name in ("train_loss_epoch", "gradient_norm_max"):
        assert history[name] == found[Trainer][1][name]
    assert history.get_metric_values("train_mean_epoch") == pytest.approx(history.get_metric_values("train_loss_epoch"))
    sizes = [6 * accumulation] * (24 // 6 // accumulation) + [2]
    assert len(trainer.found) == len(sizes)
    mean = sum(loss * size for loss, size in zip(trainer.found, sizes, strict=True)) / 26
    assert mean == pytest.approx(history.get_latest_metric("train_loss_epoch"))


def test_buffers_that_are_assigned_count_each_batch_once():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = float64_model()
            self.register_buffer("batches", torch.zeros(()))
            self.register_buffer("latest", None)

        def forward(self, x):
            self.batches = self.batches + 1
            self.latest = x.mean(0) if self.latest is None else x.mean(0) + self.latest
            return self.layer(x)

    found = []
    for trainer_class in (Trainer, Looks):
        model = Counts()
        trainer_class(model, nn.MSELoss(), sgd(model), callbacks=[]).train(DATA, 1, **IN_ORDER)
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    assert found[0]["batches"] == 4
    assert equal_weights(*found)


def test_a_decorated_step_may_compute_gradients_again():
    losses = []

    def noting(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def call(self):
            losses.append(step(self))

        return call

    class Decorated(Trainer):
        @noting
        def optimizer_step(self):
            loss = self.recompute_gradients()
            super().optimizer_step()
            return float(loss)

    model = float64_model()
    Decorated(model, nn.MSELoss(), sgd(model), callbacks=[]).train(DATA, 1, per_device_batch_size=26)
    expected = nn.functional.mse_loss(float64_model()(DATA.tensors[0]), DATA.tensors[1])
    assert losses == [pytest.approx(expected.item())]


def test_a_method_replaced_on_an_object_may_recompute_gradients():
    losses = []

    def optimizer_step(trainer: Trainer) -> None:
        losses.append(float(trainer.recompute_gradients()))

    model = float64_model()
    trainer = Trainer(model, nn.MSELoss(), sgd(model), callbacks=[])
    trainer.optimizer_step = MethodType(optimizer_step, trainer)
    trainer.train(DATA, 1, per_device_batch_size=26)
    expected = nn.functional.mse_loss(float64_model()(DATA.tensors[0]), DATA.tensors[1])
    assert losses == [pytest.approx(expected.item())]


def test_batches_are_kept_only_where_gradients_are_recomputed():
    class Steps(Trainer):
        def optimizer_step(self):
            super().optimizer_step()

    for trainer_class in (Trainer, Steps):
        model = float64_model()
        trainer = trainer_class(model, nn.MSELoss(), sgd(model), callbacks=[])
        trainer.train(DATA, 1)
        with pytest.raises(RuntimeError, match=r"in an overridden optimizer_step, .*: only then the batches"):
            trainer.recompute_gradients()


def recomputed(trainer: Trainer) -> torch.Tensor:
    """Recompute the gradients in a function, where the trainer's class does not name it."""
    return trainer.recompute_gradients()


def test_a_class_may_say_whether_it_recomputes_gradients():
    losses = []

    class InFunction(Trainer):
        recomputes_gradients = True

        def optimizer_step(self):
            losses.append(float(recomputed(self)))
            super().optimizer_step()

    class NamesItOnly(SAM):
        recomputes_gradients = False

        def optimizer_step(self):
            Trainer.optimizer_step(self)

    model = float64_model()
    InFunction(model, nn.MSELoss(), sgd(model), callbacks=[]).train(DATA, 1, per_device_batch_size=26)
    expected = nn.functional.mse_loss(float64_model()(DATA.tensors[0]), DATA.tensors[1])
    assert losses == [pytest.approx(expected.item())]
    in_event = [listener(on_optimizer_step_start=lambda trainer, **_: recomputed(trainer))]
    with pytest.raises(RuntimeError, match=r"only then the batches .*, or its class has recomputes_gradients = True"):
        NamesItOnly(model, nn.MSELoss(), sgd(model), callbacks=in_event).train(DATA, 1)


@pytest.mark.extension("tuning")
def test_lbfgs_learns_and_its_rates_can_be_tried():
    model = float64_model()
    trainer = adamw_trainer(model, optimizer=torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe"))
    before = weights(model)
    assert len(trainer.find_lr(DATA, 26, num_steps=10).lrs) >= 3
    assert equal_weights(weights(model), before)
    trainer.train(DATA, 10, per_device_batch_size=26)
    losses = trainer.run_history.get_metric_values("train_loss_epoch")
    assert losses[-1] < 0.01 * losses[0]


def test_a_factory_may_create_lbfgs():
    trainer = adamw_trainer(float64_model(), optimizer=torch.optim.LBFGS)
    trainer.train(DATA, 1, per_device_batch_size=26)
    assert isinstance(trainer.optimizer, torch.optim.LBFGS)


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("accumulation", [1, 2])
def test_recomputing_gradients_is_refused_in_other_events(accumulation):
    model = float64_model()
    callbacks = [listener(on_train_step_end=lambda trainer, **_: trainer.recompute_gradients())]
    trainer = SAM(model, nn.MSELoss(), sgd(model), callbacks=callbacks)
    with pytest.raises(RuntimeError, match="no update is under way that it could repeat"):
        trainer.train(DATA, 1, gradient_accumulation_steps=accumulation)


def test_a_closure_among_several_optimizers_needs_an_own_step():
    def optimizers(model: nn.Module) -> Any:
        return {"first": lbfgs(model[0]), "second": sgd(model[2])}

    class Each(Trainer):
        def optimizer_step(self):
            self.optimizer["first"].step(self.recompute_gradients)
            self.optimizer["second"].step()

    model = float64_model()
    with pytest.raises(ValueError, match=r"closure \(LBFGS\) does not work with other optimizers, .*several times"):
        adamw_trainer(model, optimizer=optimizers(model)).train(DATA, 1)
    before = weights(model)
    Each(model, nn.MSELoss(), optimizers(model), callbacks=[]).train(DATA, 1)
    assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("tool", ["find_batch_size", "diagnose"])
@pytest.mark.extension("tuning")
def test_tools_whose_updates_have_no_closure_refuse(tool):
    model = float64_model()
    with pytest.raises(TypeError, match=f"{tool}.. makes updates without the closure that the optimizer needs"):
        getattr(adamw_trainer(model, optimizer=lbfgs(model)), tool)(DATA)
    with pytest.raises(RuntimeError, match="no update is under way that it could repeat"):
        getattr(SAM(model, nn.MSELoss(), sgd(model), callbacks=[]), tool)(DATA)


def test_the_batches_of_a_window_are_freed_after_its_update():
    batches: list[weakref.ref[torch.Tensor]] = []
    kept: list[int] = []

    class Counting(SAM):
        def calculate_train_batch_loss(self, batch):
            batches.append(weakref.ref(batch[0]))
            return super().calculate_train_batch_loss(batch)

    count = listener(on_update_end=lambda trainer, **_: kept.append(sum(each() is not None for each in batches)))
    model = float64_model()
    trainer = Counting(model, nn.MSELoss(), sgd(model), callbacks=[count])
    trainer.train(DATA, 1, per_device_batch_size=4, gradient_accumulation_steps=3)
    assert max(kept) == 2  # the last batch, which is computed twice
