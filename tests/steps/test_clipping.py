"""The norm of gradients: where callbacks may read it, and that reading it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from tests.kinds_of_steps import KINDS, OWNERS
from tests.small_models import float64_data, float64_model, listener, make_data, same_bits, train, weights

NORM_LIMIT = {"gradient_clip_norm": 0.5}
BEFORE = ["on_train_step_start", "on_backward_start", "on_backward_end"]
AFTER = ["on_train_step_end", "on_update_end", "on_train_step_checkpoint"]


def train_reading(callback: TrainerCallback, accelerator: Any = None, **kwargs: Any) -> Trainer:
    model = float64_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [callback], seed=0, accelerator=accelerator)
    trainer.train(float64_data(16, dtype=torch.float32), 1, per_device_batch_size=4, **kwargs)
    return trainer


@pytest.mark.parametrize("event", BEFORE)
@pytest.mark.parametrize("clipping", [{}, NORM_LIMIT])
def test_the_norm_is_not_known_before_an_update(event, clipping, scaled_accelerator):
    read = listener(**{event: lambda trainer, **_: trainer.progress.update and trainer.gradient_norm})
    with pytest.raises(RuntimeError, match=r"not complete yet.*Read it in on_optimizer_step_start"):
        train_reading(read, scaled_accelerator, gradient_accumulation_steps=2, **clipping)


@pytest.mark.parametrize("event", AFTER)
@pytest.mark.parametrize("clipping", [{}, {"gradient_clip_value": 0.1}])
def test_a_norm_that_was_not_read_is_not_known_after_the_update(event, clipping):
    read = listener(**{event: lambda trainer, **_: trainer.gradient_norm})
    with pytest.raises(RuntimeError, match="or cleared already"):
        train_reading(read, **clipping)


@pytest.mark.parametrize("kind", [
    pytest.param(name, marks=pytest.mark.extension(*OWNERS.get(name, ()))) for name in KINDS if name != "sharded"
])  # fmt: skip
def test_a_norm_that_was_read_stays_until_the_step_ends(kind):
    norms: list[tuple[float, float]] = []
    latest: list[float] = []
    read = listener(
        on_optimizer_step_start=lambda trainer, **_: latest.append(float(trainer.gradient_norm)),
        on_update_end=lambda trainer, **_: norms.append((latest[-1], float(trainer.gradient_norm))),
    )
    how = KINDS[kind].how
    data = how.get("train_dataset", make_data(8))
    train(KINDS[kind].make([read]), 2, **{"train_dataset": data, "eval_dataset": data, "batch_size": 2} | how)
    assert norms
    assert all(before == after for before, after in norms)
    assert len({before for before, _ in norms}) > 1


@pytest.mark.parametrize("event", AFTER)
def test_reading_a_norm_after_clipping_changes_no_weight(event, scaled_accelerator):
    norms: list[float] = []
    read = listener(**{event: lambda trainer, **_: norms.append(float(trainer.gradient_norm))})
    trained = []
    for callback in (TrainerCallback(), read):
        scaled_accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        trained.append(weights(train_reading(callback, scaled_accelerator, **NORM_LIMIT).model))
    assert same_bits(*trained)
    assert len(norms) == 4
    assert all(norm > 0.1 for norm in norms)
