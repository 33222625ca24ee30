"""The cosine schedule: rates, layer decay, states, bad arguments."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from pytorch_accel_lite.schedulers import CosineLrScheduler
from tests.extensions.named_schedules.both_schedules import (
    COSINE,
    COSINE_CASES,
    check_ends_with_the_run,
    check_refused,
    check_state_is_plain_and_small,
    check_updates_have_the_rates_of_the_schedule,
    decayed_groups,
)
from tests.schedules import make_optimizer, rates, run
from tests.small_models import make_model

# ------------------------------------------------------------------------------------------- the rates


@pytest.mark.parametrize("case", range(len(COSINE_CASES)))
def test_cosine_has_the_ancestors_rates_until_it_breaks_off(ancestor_schedules, case):
    """With a warm-up, the ancestor drops to the smallest rate too early, by the length of the warm-up."""
    warmup, cooldown = (5 * COSINE_CASES[case].get(f"num_{part}_epochs", 0) for part in ("warmup", "cooldown"))
    last = 20 - cooldown - warmup if warmup else 50
    own = rates(CosineLrScheduler(make_optimizer(), **COSINE, **COSINE_CASES[case]))
    for mine, other in zip(own[:last], ancestor_schedules["cosine"][case]["values"][:last], strict=True):
        assert mine == pytest.approx(other, rel=1e-12)
    assert len(own[:last]) >= 10


@pytest.mark.parametrize(("warmup", "cooldown", "k_decay"), [*itertools.product([0, 2], [0, 1], [0.5, 1.0, 2.0])])
def test_cosine_has_the_rates_of_timm(warmup, cooldown, k_decay):
    timm = pytest.importorskip("timm.scheduler")
    theirs, ours = make_optimizer(), make_optimizer()
    other = timm.CosineLRScheduler(
        theirs,
        t_initial=5 * (6 - warmup - cooldown),
        lr_min=1e-3,
        warmup_t=5 * warmup,
        warmup_lr_init=1e-4,
        warmup_prefix=True,
        k_decay=k_decay,
        t_in_epochs=False,
    )
    own = CosineLrScheduler(
        ours, 6, 5, k_decay, 1e-3, num_warmup_epochs=warmup, warmup_starting_lr=1e-4, num_cooldown_epochs=cooldown
    )
    for update in range(1, 40):
        assert own.get_last_lr() == pytest.approx([group["lr"] for group in theirs.param_groups], rel=1e-12)
        own.step()
        other.step_update(update)


def test_cosine_applies_the_factors_of_layer_decay_as_timm_does():
    scheduler = pytest.importorskip("timm.scheduler").CosineLRScheduler
    model = make_model()
    first, second = (torch.optim.SGD(decayed_groups(model), lr=0.1) for _ in range(2))
    ours = CosineLrScheduler(first, 4, 5, lr_min=0.01)
    theirs = scheduler(second, t_initial=20, lr_min=0.01, t_in_epochs=False)
    for update in range(1, 25):
        ours.step()
        theirs.step_update(update)
        rates_of_timm = [group["lr"] for group in second.param_groups]
        assert ours.get_last_lr() == pytest.approx(rates_of_timm)


def test_layer_decay_factors_are_applied_only_once():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1 * s, "lr_scale": s} for s in (0.3, 1.0)]
    optimizer = torch.optim.SGD(groups)
    before = [group["lr"] for group in optimizer.param_groups]
    assert CosineLrScheduler(optimizer, 4, 5).get_updated_values(0) == before


@pytest.mark.parametrize(("scales", "given", "expected"), [
    ((1.0, 0.0), (0.1, 0.1), (0.1, 0.0)),
    ((0.5, 0.0), (0.1, 0.1), (0.05, 0.0)),
    ((0.5, 1.0), (0.1, 0.0), (0.05, 0.0)),
    ((0.5, 0.0), (0.05, 0.0), (0.05, 0.0)),  # in these proportions already
])  # fmt: skip
def test_a_layer_decay_factor_may_be_zero(scales, given, expected):
    pairs = zip(scales, given, strict=True)
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr, "lr_scale": scale} for scale, lr in pairs]
    scheduler = CosineLrScheduler(torch.optim.SGD(groups), 4, 5)
    assert scheduler.get_updated_values(0) == [*expected]


def test_end_rates_may_be_fractions_of_each_groups_own_rate():
    options = {"num_warmup_epochs": 1, "min_lr_ratio": 0.1, "warmup_starting_lr_ratio": 0.01}
    found = rates(CosineLrScheduler(make_optimizer(), **COSINE, **options))
    assert found[0] == pytest.approx([0.001, 0.003])
    assert found[1] == pytest.approx([0.001 + 0.099 / 5, 0.003 + 0.297 / 5])
    assert found[5] == pytest.approx([0.1, 0.3])
    assert found[20] == found[-1] == pytest.approx([0.01, 0.03])


@pytest.mark.parametrize(
    ("warmup", "cooldown", "expected"), [(4, 0, (10, 0)), (20, 0, (10, 0)), (2, 2, (5, 5)), (300, 100, (7, 2))]
)
def test_a_warm_up_as_long_as_the_run_is_halved(warmup, cooldown, expected):
    said = (
        f"num_warmup_epochs={warmup} and num_cooldown_epochs={cooldown} leave nothing of total_num_epochs=4 .* {{}} of"
    )
    with pytest.warns(UserWarning, match=said.format("{} and {}".format(*expected))):
        scheduler = CosineLrScheduler(
            make_optimizer(1.0), **COSINE, num_warmup_epochs=warmup, num_cooldown_epochs=cooldown
        )
    assert (scheduler.num_warmup_steps, 20 - scheduler.num_annealing_steps - expected[0]) == expected
    found = [values[0] for values in rates(scheduler, 21)]
    assert found[0] == found[20] == 1e-6
    assert found.index(1.0) == expected[0]
    assert found[: expected[0] + 1] == sorted(found[: expected[0] + 1])


@pytest.mark.filterwarnings("ignore:num_warmup_epochs")
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_a_run_of_a_few_updates_has_a_schedule_with_any_warm_up(updates):
    create = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=5, num_cooldown_epochs=10)
    trainer = run(create, epochs=None, max_num_train_steps=updates)
    assert len(trainer.noting.rates) == updates
    assert max(trainer.noting.rates) == pytest.approx(0.1) or updates > 1


# ------------------------------------------------------------------------------------ in the trainer


@pytest.mark.parametrize(
    "create", [CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1, num_cooldown_epochs=0.5)]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_update_uses_the_rate_of_its_scheduler_step(create, accumulation):
    check_updates_have_the_rates_of_the_schedule(create, accumulation)


@pytest.mark.parametrize(("scheduler_class", "smallest"), [(CosineLrScheduler, 0.01)])
def test_a_schedule_ends_with_a_run_limited_to_some_updates(scheduler_class, smallest):
    check_ends_with_the_run(scheduler_class, smallest)


def test_a_tensor_learning_rate_stays_the_same_tensor():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=rate, capturable=True)
    scheduler = CosineLrScheduler(optimizer, 1, 10)
    for _ in range(5):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.25, rel=1e-5)
    assert type(scheduler.get_last_lr()[0]) is type(scheduler.base_lr_values[0]) is float


# ------------------------------------------------------------------------------------------ states


@pytest.mark.parametrize("create", [partial(CosineLrScheduler, **COSINE)])
def test_a_state_is_plain_and_small(create):
    check_state_is_plain_and_small(create)


# ----------------------------------------------------------------------------------------- bad input

COS = partial(CosineLrScheduler, total_num_epochs=4, num_update_steps_per_epoch=5)


@pytest.mark.parametrize(
    ("create", "kwargs", "error", "message"),
    [
        (COS, {"total_num_epochs": 0}, ValueError, "total_num_epochs=0 must be greater than 0"),
        (
            COS,
            {"total_num_epochs": 0.05},
            ValueError,
            "total_num_epochs=0.05 with num_update_steps_per_epoch=5 is less",
        ),
        (COS, {"total_num_epochs": None}, TypeError, "total_num_epochs=None must be a number"),
        (COS, {"num_update_steps_per_epoch": 1.5}, TypeError, r"num_update_steps_per_epoch=1\.5 must be an integer"),
        (COS, {"num_warmup_epochs": -1}, ValueError, "num_warmup_epochs=-1 must be at least 0"),
        (COS, {"num_cooldown_epochs": -1}, ValueError, "num_cooldown_epochs=-1 must be at least 0"),
        (COS, {"k_decay": 0}, ValueError, "k_decay=0 must be greater than 0"),
        (COS, {"lr_min": math.inf}, ValueError, "lr_min=inf must be at least 0"),
        (COS, {"min_lr_ratio": 2}, ValueError, "min_lr_ratio=2 must be at least 0 and at most 1"),
        (COS, {"warmup_starting_lr": "low"}, TypeError, "warmup_starting_lr='low' must be a number"),
        (COS, {"warmup_starting_lr_ratio": -1}, ValueError, "warmup_starting_lr_ratio=-1 must be at least 0"),
    ],
)
def test_schedules_refuse_bad_rates_and_lengths(create, kwargs, error, message):
    check_refused(create, kwargs, error, message)


@pytest.mark.extension("schedule_preview")
def test_a_preview_has_the_rates_of_a_run_of_the_same_length():
    from pytorch_accel_lite.schedulers import schedule_values

    ours = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1, warmup_starting_lr=0.01)
    (values,) = schedule_values(ours, 10, 0.1, num_epochs=5)
    assert max(values) == pytest.approx(0.1)
    assert values[0] < values[1] <= values[2] > values[-1]
