"""Messages about rates that have no effect; ``tests/run/test_second_runs.py`` has those that a schedule has left."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR, StepLR

from tests.small_models import make_model, make_trainer, train


@pytest.mark.parametrize(
    ("create", "named"),
    [
        (None, "no scheduler"),
        (partial(StepLR, step_size=1), "StepLR"),
        (partial(LambdaLR, lr_lambda=lambda n: n / 6), "LambdaLR"),
    ],
)
def test_a_run_whose_schedule_ignores_layer_decay_warns(create, named):
    model = make_model()
    *first, last = model.parameters()
    groups = [{"params": first, "lr_scale": 0.25}, {"params": [last], "lr_scale": 1.0}]  # as from timm's layer decay
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD(groups, lr=0.1))
    with pytest.warns(UserWarning, match=f"lr_scale.*{named}"):
        train(trainer, create_scheduler_fn=create)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "schedule"),
    [
        (0.5, partial(OneCycleLR, max_lr=0.1, total_steps=9)),
        (0.5, partial(CyclicLR, base_lr=0.01, max_lr=0.1)),
        (0.1, partial(OneCycleLR, max_lr=0.1, total_steps=9)),
        (0.01, partial(CyclicLR, base_lr=0.01, max_lr=0.1)),
        (None, partial(OneCycleLR, max_lr=0.1, total_steps=9)),  # torch's default
        (torch.tensor(0.1), partial(OneCycleLR, max_lr=0.1, total_steps=9)),
    ],
)
def test_a_rate_that_a_schedule_replaces_is_named(rate, schedule, capsys):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **({} if rate is None else {"lr": rate}))
    trainer = make_trainer(model=model, optimizer=optimizer)
    train(trainer, epochs=1, create_scheduler_fn=schedule)
    printed = capsys.readouterr().out
    assert ("has no effect" in printed) == (rate == 0.5)
    kind = schedule.func.__name__
    if rate == 0.5:
        assert f"learning rate 0.5 has no effect: {kind} sets rates of its own, up to max_lr=0.1." in printed


def test_a_schedule_too_short_does_not_hide_an_unused_rate(capsys):
    model = make_model()
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(ValueError, match="OneCycleLR has total_steps=2, but the run steps it"):
        train(trainer, create_scheduler_fn=partial(OneCycleLR, max_lr=0.1, total_steps=2))
    assert "learning rate 0.5 has no effect" in capsys.readouterr().out
