"""timm's schedulers have the learning rates of timm's own training script."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from pytorch_accel_lite import TrainerPlaceholderValues, TrainerWithTimmScheduler
from tests.small_models import listener, make_data, make_model, make_trainer, train

scheduler = pytest.importorskip("timm.scheduler")

P = TrainerPlaceholderValues
PER_EPOCH = P.NUM_UPDATE_STEPS_PER_EPOCH


def rates_of(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


class Noting(TrainerWithTimmScheduler):
    """Records the learning rates of each update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rates: list[list[float]] = []
        super().__init__(*args, **kwargs)

    def optimizer_step(self) -> None:
        self.rates.append(rates_of(self.optimizer))
        super().optimizer_step()


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """Two groups with learning rates of their own."""
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.1)


def run(factory: Any, **kwargs: Any) -> Noting:
    model = make_model()
    trainer = make_trainer(model=model, optimizer=make_optimizer(model), trainer_class=Noting)
    train(trainer, create_scheduler_fn=factory, **kwargs)
    return trainer


def rates_of_timms_script(create: Any, epochs: int, updates_per_epoch: int, metrics: Any = None) -> list[list[float]]:
    """The rates of each update, in the order of calls of timm's train.py; the last are those after the run."""
    optimizer = make_optimizer(make_model())
    lr_scheduler = create(optimizer)
    rates = []
    for epoch in range(epochs):
        num_updates = epoch * updates_per_epoch
        for _ in range(updates_per_epoch):
            rates.append(rates_of(optimizer))
            optimizer.step()
            num_updates += 1
            lr_scheduler.step_update(num_updates=num_updates)
        lr_scheduler.step(epoch + 1, metrics[epoch] if metrics else None)
    return [*rates, rates_of(optimizer)]


@pytest.mark.sampled
@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize(("accumulation", "updates"), [(1, 7), (2, 4), (7, 1)])
@pytest.mark.parametrize(("in_epochs", "prefix"), [(True, True), (True, False), (False, True)])
def test_a_cosine_schedule_with_warm_up_gives_timms_rates(evaluate, accumulation, updates, in_epochs, prefix):
    options = {"lr_min": 1e-3, "warmup_lr_init": 1e-4, "warmup_prefix": prefix, "t_in_epochs": in_epochs}
    create = partial(scheduler.CosineLRScheduler, **options)
    if in_epochs:
        ours, timms = {"t_initial": P.NUM_EPOCHS, "warmup_t": 2}, {"t_initial": 6, "warmup_t": 2}
    else:
        ours = {"t_initial": P.MAX_NUM_TRAIN_STEPS, "warmup_t": 2 * PER_EPOCH}
        timms = {"t_initial": 6 * updates, "warmup_t": 2 * updates}
    trainer = run(
        partial(create, **ours),
        epochs=6,
        size=13,
        gradient_accumulation_steps=accumulation,
        eval_dataset=make_data(3) if evaluate else None,
    )
    expected = rates_of_timms_script(partial(create, **timms), 6, updates)
    assert [*trainer.rates, rates_of(trainer.optimizer)] == expected
    assert len({tuple(rates) for rates in expected}) >= (6 if in_epochs else 6 * updates + 1)  # it does change


@pytest.mark.parametrize(
    "create",
    [
        partial(scheduler.StepLRScheduler, decay_t=2, decay_rate=0.5, warmup_t=1, warmup_lr_init=1e-3),
        partial(scheduler.MultiStepLRScheduler, decay_t=[1, 3], decay_rate=0.5),
        partial(scheduler.PolyLRScheduler, t_initial=5, power=0.9),
        partial(scheduler.TanhLRScheduler, t_initial=5),
        partial(scheduler.CosineLRScheduler, t_initial=2, cycle_limit=3, cycle_decay=0.5),
        partial(scheduler.CosineLRScheduler, t_initial=5, noise_range_t=(1, 4), noise_seed=3),
    ],
    ids=lambda create: create.func.__name__,
)
def test_other_schedules_give_timms_rates(create):
    trainer = run(create, epochs=5, size=6, eval_dataset=make_data(3))
    assert [*trainer.rates, rates_of(trainer.optimizer)] == rates_of_timms_script(create, 5, 3)


def test_schedulers_from_timms_own_factory_give_timms_rates():
    def create(optimizer: Any, updates: int) -> Any:
        made, _ = scheduler.create_scheduler_v2(
            optimizer, sched="cosine", num_epochs=4, warmup_epochs=1, step_on_epochs=False, updates_per_epoch=updates
        )
        return made

    trainer = run(partial(create, updates=PER_EPOCH), epochs=4, size=6)
    assert [*trainer.rates, rates_of(trainer.optimizer)] == rates_of_timms_script(partial(create, updates=3), 4, 3)


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
@pytest.mark.parametrize(("evaluate", "metric"), [(True, "eval_loss_epoch"), (False, "train_loss_epoch")])
def test_a_plateau_schedule_follows_evaluation_or_training_loss(evaluate, metric):
    create = partial(scheduler.PlateauLRScheduler, decay_rate=0.5, patience_t=0, mode="min", threshold=0.5)
    trainer = run(create, epochs=12, size=6, eval_dataset=make_data(3) if evaluate else None)
    losses = trainer.run_history.get_metric_values(metric)
    expected = rates_of_timms_script(create, 12, 3, losses)
    assert [*trainer.rates, rates_of(trainer.optimizer)] == expected
    assert expected[-1] < expected[0]


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
def test_a_plateau_schedule_follows_rare_evaluations_alone():
    create = partial(scheduler.PlateauLRScheduler, decay_rate=0.5, patience_t=0, mode="max")
    every = run(create, epochs=9, size=6, eval_dataset=make_data(3))
    every_other = run(create, epochs=9, size=6, eval_dataset=make_data(3), evaluate_every="2 epochs")
    assert [rates[0] for rates in every.rates[2::3]] == [0.1, *(0.1 / 2**n for n in range(8))]
    assert [rates[0] for rates in every_other.rates[2::3]] == [0.1] * 4 + [0.05] * 2 + [0.025] * 2 + [0.0125]


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
def test_a_plateau_schedule_ignores_an_earlier_runs_evaluation():
    create = partial(scheduler.PlateauLRScheduler, decay_rate=0.5, patience_t=0, mode="min", threshold=0.0)
    trainer = run(None, epochs=1, size=6, eval_dataset=make_data(3))
    trainer.rates.clear()
    train(trainer, epochs=4, create_scheduler_fn=create, reset_run_history=False)
    losses = trainer.run_history.get_metric_values("train_loss_epoch")[1:]
    assert losses == sorted(losses, reverse=True)  # ever better: no reason to decay
    assert {tuple(rates) for rates in trainer.rates} == {(0.1, 0.02)}


def test_a_limit_of_updates_gives_a_schedules_first_rates():
    create = partial(scheduler.CosineLRScheduler, t_initial=12, warmup_t=3, warmup_lr_init=1e-4, t_in_epochs=False)
    trainer = run(create, epochs=None, max_num_train_steps=7, size=6)
    assert trainer.rates == rates_of_timms_script(create, 4, 3)[:7]


def test_a_second_run_restarts_its_schedule():
    create = partial(scheduler.CosineLRScheduler, t_initial=3, warmup_t=1, warmup_lr_init=1e-4)
    trainer = run(create, epochs=3, size=6)
    first = list(trainer.rates)
    trainer.rates.clear()
    for group, rate in zip(trainer.optimizer.param_groups, (0.1, 0.02), strict=True):
        del group["initial_lr"]
        group["lr"] = rate
    train(trainer, epochs=3, create_scheduler_fn=create)
    assert trainer.rates == first
    assert trainer.num_updates == 9


def test_without_a_scheduler_the_trainer_is_an_ordinary_one():
    trainer = run(None, epochs=2)
    assert {tuple(rates) for rates in trainer.rates} == {(0.1, 0.02)}
    assert trainer.num_updates == 6


def test_a_torch_scheduler_in_a_timm_trainer_is_refused():
    from torch.optim.lr_scheduler import StepLR

    trainer = make_trainer(trainer_class=TrainerWithTimmScheduler)
    with pytest.raises(AttributeError, match="'StepLR' object has no attribute 'step_update'"):
        train(trainer, create_scheduler_fn=partial(StepLR, step_size=1))


def test_timm_schedulers_in_a_plain_trainer_name_the_right_one():
    timms = partial(scheduler.CosineLRScheduler, t_initial=9)
    with pytest.raises(TypeError, match=r"CosineLRScheduler.step needs an argument.*TrainerWithTimmScheduler"):
        train(make_trainer(), create_scheduler_fn=timms)


def test_the_user_cannot_choose_when_a_timm_scheduler_is_stepped():
    with pytest.raises(ValueError, match=r"scheduler_interval='epoch': TrainerWithTimmScheduler steps.*Omit"):
        run(partial(scheduler.CosineLRScheduler, t_initial=9), scheduler_interval="epoch")


def test_the_state_of_a_timm_scheduler_is_saved_and_loaded(tmp_path):
    create = partial(scheduler.CosineLRScheduler, t_initial=9, t_in_epochs=False)
    trainer = run(create, epochs=2, size=6)
    trainer.save_checkpoint(tmp_path / "model.pt")
    other = run(create, epochs=1, size=6)
    other.load_checkpoint(tmp_path / "model.pt")
    assert other.scheduler.state_dict() == trainer.scheduler.state_dict()
    assert rates_of(other.optimizer) == rates_of(trainer.optimizer)
    assert all(math.isfinite(rate) for rate in rates_of(other.optimizer))


def test_a_method_of_a_subclass_does_not_stop_the_schedule():
    class Empty(TrainerWithTimmScheduler):
        def training_run_epoch_end(self):
            pass

        def eval_epoch_end(self):
            pass

    create = partial(scheduler.StepLRScheduler, decay_t=1, decay_rate=0.5)
    rates: list[list[float]] = []
    note = listener(on_train_epoch_start=lambda trainer: rates.append(rates_of(trainer.optimizer)))
    train(make_trainer([note], trainer_class=Empty), epochs=3, eval_dataset=True, create_scheduler_fn=create)
    first = rates[0][0]
    assert [each[0] for each in rates] == [first, first / 2, first / 4]
