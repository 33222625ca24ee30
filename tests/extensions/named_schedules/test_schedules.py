"""Warmup-stable-decay and schedules by name: rates, states, and runs continued before or after a decay."""

from __future__ import annotations

import itertools
import math
import re
from functools import partial
from typing import get_args

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.schedulers import CosineLrScheduler, ScheduleName, WSDLrScheduler
from pytorch_accel_lite.schedulers.wsd_scheduler import DECAYS, estimate_checkpoint_steps
from tests.extensions.named_schedules.both_schedules import (
    COSINE,
    WSD_CASES,
    check_ends_with_the_run,
    check_refused,
    check_state_is_plain_and_small,
    check_updates_have_the_rates_of_the_schedule,
    rates_of_layers,
)
from tests.schedules import check_refused_before_training, make_optimizer, rates, run, saved_run
from tests.small_models import Stream, equal_weights, make_data, weights

P = TrainerPlaceholderValues
WSD = partial(WSDLrScheduler, total_steps=20)


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_base_rate_below_the_smallest_rate_is_not_raised(warmup):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter], "lr": 1e-8}, {"params": [nn.Parameter(torch.zeros(1))]}], 0.1)
    for scheduler in (
        CosineLrScheduler(optimizer, 4, 5, num_warmup_epochs=warmup),
        WSDLrScheduler(optimizer, total_steps=20, num_warmup_steps=5 * warmup),
    ):
        small, large = zip(*rates(scheduler), strict=True)
        assert max(small) <= 1e-8
        assert max(large) == 0.1


@pytest.mark.parametrize("case", range(len(WSD_CASES)))
def test_wsd_has_the_periods_and_rates_of_the_ancestor(ancestor_schedules, case):
    theirs = ancestor_schedules["wsd"][case]
    scheduler = WSDLrScheduler(make_optimizer(), **WSD_CASES[case])
    assert scheduler.get_checkpoint_steps() == theirs["steps"]
    assert scheduler.get_decay_info() == theirs["decays"]
    for own, other in zip(rates(scheduler), theirs["values"], strict=True):
        assert own == pytest.approx(other, rel=1e-12)


def test_states_of_the_ancestor_are_read(ancestor_schedules):
    scheduler = CosineLrScheduler(make_optimizer(), **COSINE)
    scheduler.load_state_dict(ancestor_schedules["cosine"][0]["state"])
    assert scheduler.num_updates == ancestor_schedules["cosine"][0]["state"]["num_updates"]
    assert scheduler.get_last_lr() == scheduler.get_updated_values(scheduler.num_updates)
    state = ancestor_schedules["wsd"][0]["state"]
    begun = WSDLrScheduler(make_optimizer(1.0, 2.0), total_steps=20)
    begun.step()
    with pytest.warns(UserWarning, match="does not save the schedule's position: it continues from update 1"):
        begun.load_state_dict(state)
    assert begun.num_updates == 1
    assert begun.get_last_lr() == [0.1, 0.3]
    with pytest.raises(ValueError, match="lacks num_updates"):
        begun.load_state_dict({"last_epoch": 3})
    continued = WSDLrScheduler(make_optimizer(1.0, 2.0), total_steps=20, is_continuation_from_checkpoint=True)
    continued.load_state_dict(state)
    assert continued.get_last_lr() == [0.1, 0.3]


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_schedules_by_name_apply_the_factors_of_layer_decay(name, recwarn):
    of_layers, plain = rates_of_layers(name, warmup_steps=2), run(name, epochs=2, warmup_steps=2).noting.rates
    assert of_layers == [[0.25 * rate, rate] for rate in plain]
    assert not recwarn


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        # At a quarter, a half and three quarters of the decay, for a base rate of 1 that ends at 0.2.
        ("inverse", [1 / 2, 1 / 3, 1 / 4]),
        ("sqrt", [0.6, 1 - 0.8 * math.sqrt(0.5), 1 - 0.8 * math.sqrt(0.75)]),
        ("linear", [0.8, 0.6, 0.4]),
        ("cosine", [0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5)]),
    ],
)
def test_the_shapes_of_the_decay(decay, expected):
    scheduler = WSDLrScheduler(make_optimizer(1.0), total_steps=8, decay_phase_ratio=0.5, lr_min=0.2, decay=decay)
    found = [values[0] for values in rates(scheduler, 12)]
    assert found == pytest.approx([1.0] * 5 + expected + [0.2] * 4)


def test_each_period_is_stable_then_decays_from_the_base_rate():
    scheduler = WSDLrScheduler(
        make_optimizer(1.0), checkpoint_steps=[10, 16, 40], num_warmup_steps=4, decay_phase_ratio=0.5, decay="linear"
    )
    assert scheduler.get_checkpoint_steps() == [10, 16, 40]
    assert [period["pre_decay_step"] for period in scheduler.get_decay_info()] == [5, 13, 28]
    found = [values[0] for values in rates(scheduler, 41)]
    for n in (4, 5, 10, 13, 16, 28):
        assert found[n] == 1.0
    for start, end in ((0, 4), (5, 10), (13, 16), (28, 41)):
        assert len(set(found[start:end])) == end - start
    phases = [scheduler.get_phase_info(n)["phase"] for n in range(42)]
    runs = [(phase, len(list(group))) for phase, group in itertools.groupby(phases)]
    decays = [("decay", 5), ("stable", 3), ("decay", 3), ("stable", 12), ("decay", 12)]
    assert runs == [("warmup", 4), ("stable", 1), *decays, ("finished", 2)]


@pytest.mark.parametrize(("total", "ratio", "expected"), [(100, 0.29, 29), (17, 0.3, 5), (4, 0.1, 1), (8, 1.0, 8)])
def test_a_decay_has_at_least_one_update(total, ratio, expected):
    scheduler = WSDLrScheduler(make_optimizer(), total_steps=total, decay_phase_ratio=ratio)
    assert scheduler.get_decay_info()[0]["decay_steps"] == expected


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_a_run_of_a_few_updates_has_a_decay(updates):
    create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0)
    trainer = run(create, epochs=None, max_num_train_steps=updates)
    assert trainer.noting.rates == [pytest.approx(0.1)] * updates
    assert trainer.scheduler.get_updated_values(updates) == [pytest.approx(1e-7)]


def test_a_warm_up_that_reaches_into_the_decay_ends_before_it():
    problem = (
        r"of 19 updates \(num_warmup_steps, .*\) reaches into the first decay, .* after 18 updates. It is shortened"
    )
    with pytest.warns(UserWarning, match=problem):
        scheduler = WSDLrScheduler(make_optimizer(1.0), total_steps=20, num_warmup_steps=19)
    assert scheduler.num_warmup_steps == 18
    found = [values[0] for values in rates(scheduler, 21)]
    assert found.index(1.0) == 18
    assert found[20] == pytest.approx(1e-6)


def test_without_a_decay_the_rate_stays_stable():
    scheduler = WSDLrScheduler(make_optimizer(1.0), total_steps=20, num_warmup_steps=4, decay_phase_ratio=0)
    assert {values[0] for values in rates(scheduler, 30)[4:]} == {1.0}
    assert {scheduler.get_phase_info(n)["phase"] for n in range(20)} == {"warmup", "stable"}


def test_the_warm_up_of_wsd_is_a_hundredth_of_the_run_by_default(ancestor_schedules):
    scheduler = WSDLrScheduler(make_optimizer(), total_steps=1000, num_warmup_steps=None)
    assert scheduler.num_warmup_steps == 10
    for own, other in zip(rates(scheduler), ancestor_schedules["default warm-up"], strict=True):
        assert own == pytest.approx(other, rel=1e-12)


def test_checkpoint_steps_end_at_the_last_step():
    assert estimate_checkpoint_steps(100, 2) == [50, 100]
    assert estimate_checkpoint_steps(17, 3) == [4, 8, 17]
    for number in range(1, 7):
        steps = estimate_checkpoint_steps(2**number, number)
        assert len(set(steps)) == number
        assert steps[-1] == 2**number


@pytest.mark.extension("streams")
def test_data_without_length_still_gives_a_schedule_its_updates():
    create = partial(WSDLrScheduler, total_steps=P.MAX_NUM_TRAIN_STEPS, num_warmup_steps=None)
    data = {"train_dataset": Stream(6), "train_dataloader_kwargs": {}}
    trainer = run(create, epochs=None, max_num_train_steps=20, seed=None, **data)
    assert trainer.scheduler.total_steps == 20
    assert trainer.scheduler.get_current_phase_info()["phase"] == "finished"
    assert trainer.scheduler.get_current_step() == 20


def test_a_second_run_with_the_optimizer_begins_at_its_rates():
    trainer = run(CosineLrScheduler.create_scheduler_fn())
    assert trainer.optimizer.param_groups[0]["lr"] < 1e-4
    trainer.train(make_data(6), 4, create_scheduler_fn=WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0))
    assert trainer.scheduler.base_lr_values == [0.1]


@pytest.mark.extension("schedule_preview")
@pytest.mark.parametrize("warmup", [0, 3, 0.25])
def test_schedules_by_name_are_as_long_as_the_run(warmup):
    from pytorch_accel_lite.schedulers import schedule_values

    found = {}
    for name in get_args(ScheduleName):
        trainer = run(name, epochs=None, max_num_train_steps=12, warmup_steps=warmup)
        found[name] = trainer.noting.rates
        assert found[name] == schedule_values(name, 12, 0.1, warmup_steps=warmup)[0]
    ramp = [] if warmup == 0 else [1e-6 + (0.1 - 1e-6) * step / 3 for step in range(3)]
    left = 12 - len(ramp)
    done = [step / left for step in range(left)]
    assert found["constant"] == pytest.approx([*ramp, *[0.1] * left])
    assert found["linear"] == pytest.approx([*ramp, *(0.1 * (1 - t) for t in done)])
    assert found["cosine"] == pytest.approx([*ramp, *(0.05 * (1 + math.cos(math.pi * t)) for t in done)])
    assert found["wsd"] == pytest.approx([*ramp, *[0.1] * left])  # the only update of the decay begins at the top
    assert trainer.scheduler.get_last_lr() == [0.0]


def test_a_schedule_by_name_may_count_epochs():
    trainer = run("linear", epochs=4, scheduler_interval="epoch", warmup_steps=1)
    assert trainer.noting.rates == pytest.approx([1e-6] * 3 + [0.1] * 3 + [0.2 / 3] * 3 + [0.1 / 3] * 3)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "cosine",
            {"epochs": 1, "scheduler_interval": "epoch", "warmup_steps": 2},
            "warmup_steps=2, in epochs, is longer than the run, which has 1 epoch. It is shortened to 1 epoch.",
        ),
        (
            "constant",
            {"epochs": 3, "warmup_steps": 20},
            "warmup_steps=20, in updates, is longer than the run, which has 9 updates. It is shortened to 9 updates.",
        ),
        (
            "wsd",
            {"epochs": None, "max_num_train_steps": 20, "warmup_steps": 0.95},
            "warmup_steps=0.95 reaches into the decay, which starts after 18 updates. It is shortened to 18 updates.",
        ),
    ],
)
def test_a_warm_up_that_is_too_long_is_named_as_passed(name, arguments, message):
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$") as caught:
        run(name, **arguments)
    assert len(caught) == 1


def test_without_a_decay_a_long_warm_up_ends_with_its_period():
    problem = r"of 30 updates .* does not end in the first period, which has 20 updates. It is shortened to 20"
    with pytest.warns(UserWarning, match=problem):
        scheduler = WSDLrScheduler(make_optimizer(1.0), total_steps=20, num_warmup_steps=30, decay_phase_ratio=0)
    assert scheduler.num_warmup_steps == 20


def test_several_optimizers_may_have_schedules_by_name():
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in model.items()}

    class Both(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": sum(part(batch[0]).mean() for part in self.model.values())}

    trainer = Both(model, None, optimizers, callbacks=[])
    trainer.train(make_data(6), 2, create_scheduler_fn={"a": "linear", "b": partial(StepLR, step_size=1)})
    assert trainer.scheduler["a"].get_last_lr() == [0.0]
    assert isinstance(trainer.scheduler["b"], StepLR)


@pytest.mark.extension("elastic_schedules")
def test_a_named_schedule_resumes_with_another_batch_size(tmp_path):
    kwargs = {"warmup_steps": 0.25, "train_dataset": make_data(12)}
    whole = run("cosine", SaveTrainingStateCallback(tmp_path, save_every_n_epochs=2), **kwargs)
    other = run(
        "cosine",
        SaveTrainingStateCallback(tmp_path),
        resume_from=tmp_path / "update-000000012",
        per_device_batch_size=4,
        **kwargs,
    )
    assert other.noting.rates == pytest.approx(whole.noting.rates[12::2])


def test_a_state_from_before_the_decay_continues_to_a_longer_run(tmp_path):
    """The same bits as a run of the longer length from the start."""
    create = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0, decay_phase_ratio=0.5)
    short = saved_run(tmp_path, create, epochs=4)
    assert short.noting.rates[-1] < 0.05
    longer = saved_run(tmp_path, create, epochs=8, resume_from=tmp_path / "states" / "update-000000006")
    from_the_start = run(create, epochs=8)
    assert longer.noting.rates == from_the_start.noting.rates[6:]
    assert equal_weights(weights(longer.model), weights(from_the_start.model))


def test_all_decay_shapes_go_from_the_base_to_the_minimum():
    for shape in DECAYS.values():
        assert shape(0.0, 0.05) == 1.0
        assert shape(1.0, 0.05) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "create",
    [
        WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=1, num_checkpoints=2, decay_phase_ratio=0.5),
        WSDLrScheduler.create_scheduler_fn(lr_min=0.1, decay="inverse", decay_phase_ratio=0.4),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_update_uses_the_rate_of_its_scheduler_step(create, accumulation):
    check_updates_have_the_rates_of_the_schedule(create, accumulation)


def test_a_schedule_ends_with_a_run_limited_to_some_updates():
    check_ends_with_the_run(WSDLrScheduler, 0.01 * 0.1)


def test_a_state_is_plain_and_small():
    check_state_is_plain_and_small(WSD)


@pytest.mark.parametrize(
    ("create", "kwargs", "error", "message"),
    [
        (
            WSDLrScheduler,
            {},
            ValueError,
            "total_steps=None, num_epochs=None and num_update_steps_per_epoch=None do not",
        ),
        (WSDLrScheduler, {"num_epochs": 3}, ValueError, "Pass total_steps, or both of the others"),
        (
            WSDLrScheduler,
            {"num_epochs": 0, "num_update_steps_per_epoch": 5},
            ValueError,
            "num_epochs=0 must be greater",
        ),
        (
            WSDLrScheduler,
            {"num_epochs": 0.05, "num_update_steps_per_epoch": 5},
            ValueError,
            r"num_epochs=0\.05 with num_update_steps_per_epoch=5 is less than one update",
        ),
        (WSD, {"total_steps": 0}, ValueError, "total_steps=0 must be at least 1"),
        (WSD, {"total_steps": P.MAX_NUM_TRAIN_STEPS}, TypeError, r"total_steps=\S+MAX_NUM_TRAIN_STEPS must be an int"),
        (WSD, {"num_checkpoints": 0}, ValueError, "num_checkpoints=0 must be at least 1"),
        (WSD, {"num_checkpoints": 5}, ValueError, "num_checkpoints=5 is too many for total_steps=20: .* least 32"),
        (WSD, {"decay_phase_ratio": -1}, ValueError, "decay_phase_ratio=-1 must be at least 0 and at most 1"),
        (WSD, {"decay_phase_ratio": 1.1}, ValueError, r"decay_phase_ratio=1\.1 must be at least 0 and at most 1"),
        (WSD, {"decay_phase_ratio": "all"}, TypeError, "decay_phase_ratio='all' must be a number, not str"),
        (WSD, {"lr_min": -0.1}, ValueError, r"lr_min=-0\.1 must be at least 0 and at most 1"),
        (WSD, {"lr_min": math.nan}, ValueError, "lr_min=nan must be at least 0"),
        (WSD, {"lr_min": 0, "decay": "inverse"}, ValueError, "lr_min=0: the inverse decay never reaches 0"),
        (WSD, {"warmup_starting_lr": -1}, ValueError, "warmup_starting_lr=-1 must be at least 0"),
        (WSD, {"num_warmup_steps": -1}, ValueError, "num_warmup_steps=-1 must be at least 0"),
        (WSD, {"num_warmup_steps": 1.5}, TypeError, r"num_warmup_steps=1\.5 must be an integer"),
        (WSD, {"decay": "square"}, ValueError, "decay='square' must be 'inverse' or 'sqrt' or 'linear'"),
        (WSD, {"checkpoint_steps": []}, ValueError, r"checkpoint_steps=\[\] must increase"),
        (WSD, {"checkpoint_steps": [8, 9]}, ValueError, r"checkpoint_steps=\[8, 9\] must increase by at least 2"),
    ],
)
def test_schedules_refuse_bad_rates_and_lengths(create, kwargs, error, message):
    check_refused(create, kwargs, error, message)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"warmup_steps": 1.5},
            TypeError,
            "warmup_steps=1.5 must be 0, a whole number of updates, or a fraction of the run below 1",
        ),
        ({"warmup_steps": 1.5, "scheduler_interval": "epoch"}, TypeError, "must be 0, a whole number of epochs"),
        ({"warmup_steps": -0.5}, ValueError, "warmup_steps=-0.5 must be at least 0"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps=-1 must be at least 0"),
        ({"warmup_steps": math.inf}, ValueError, "warmup_steps=inf must be at least 0"),
        ({"warmup_steps": "5 %"}, TypeError, "warmup_steps='5 %' must be a number"),
        (
            {"scheduler_interval": "epoch", "scheduler_metric": "train_loss_epoch"},
            ValueError,
            "WSDLrScheduler.step takes no metric",
        ),
    ],
)
def test_invalid_arguments_for_a_schedule_by_name_are_named(arguments, error, message):
    arguments = {"create_scheduler_fn": "wsd", **arguments}
    check_refused_before_training(arguments, error, message)
