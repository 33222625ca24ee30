"""What the tests of the cosine and of warm-up, stable, decay share: the ancestor's rates, layer decay, and checks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from tests.schedules import make_optimizer, rates, run
from tests.small_models import adamw_trainer, listener, make_data, make_model

WSD_CASES: list[dict[str, Any]] = [
    {"total_steps": 20, "decay_phase_ratio": 0.5, "lr_min": 0.1},
    {"total_steps": 17, "decay_phase_ratio": 0.3, "lr_min": 0.1, "use_inverse_sqrt_decay": False},
    {"total_steps": 40, "decay_phase_ratio": 0.2, "num_checkpoints": 3, "num_warmup_steps": 4},
    {"num_epochs": 4, "num_update_steps_per_epoch": 7, "num_warmup_steps": 3, "warmup_starting_lr": 0.01},
    {"total_steps": 40, "num_warmup_steps": 4, "is_continuation_from_checkpoint": True},
    {"total_steps": 10, "decay_phase_ratio": 1.0, "use_inverse_sqrt_decay": False},
]
COSINE_CASES: list[dict[str, Any]] = [
    {},
    {"k_decay": 2.0, "lr_min": 0.01},
    {"num_cooldown_epochs": 1, "min_lr_ratio": 0.1},
    {"num_warmup_epochs": 1},
    {"num_warmup_epochs": 1, "warmup_starting_lr": 0.01, "num_cooldown_epochs": 1},
]
COSINE = {"total_num_epochs": 4, "num_update_steps_per_epoch": 5}
ANCESTOR = """
import json, sys
import torch
from pytorch_accelerated.schedulers import CosineLrScheduler, WSDLrScheduler

wsd, cosine = json.loads(sys.argv[1])

def make_optimizer():
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.3)])

def look(scheduler):
    values = [scheduler.get_updated_values(n) for n in range(50)]
    for _ in range(3):
        scheduler.step()
    return {"values": values, "state": scheduler.state_dict()}

found = {"wsd": [], "cosine": [look(CosineLrScheduler(make_optimizer(), 4, 5, **kwargs)) for kwargs in cosine]}
for kwargs in wsd:
    scheduler = WSDLrScheduler(make_optimizer(), **kwargs)
    info = {"steps": scheduler.get_checkpoint_steps(), "decays": scheduler.get_decay_info()}
    found["wsd"].append(look(scheduler) | info)
default = WSDLrScheduler(make_optimizer(), total_steps=1000, num_warmup_steps=None)
found["default warm-up"] = look(default)["values"]
print(json.dumps(found))
"""


def decayed_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups as those of timm's layer decay: one rate for all, and a factor for each."""
    *first, last = model.parameters()
    return [{"params": first, "lr_scale": 0.25}, {"params": [last], "lr_scale": 1.0}]


def rates_of_layers(create: Any, **kwargs: Any) -> list[list[float]]:
    """Train with layer decay; return the rates of each update."""
    used: list[list[float]] = []
    model = make_model()
    note = listener(on_optimizer_step_start=lambda t: used.append([g["lr"] for g in t.optimizer.param_groups]))
    trainer = adamw_trainer(model, optimizer=torch.optim.SGD(decayed_groups(model), lr=0.1), callbacks=[note])
    trainer.train(make_data(6), 2, per_device_batch_size=2, create_scheduler_fn=create, **kwargs)
    return used


def check_updates_have_the_rates_of_the_schedule(create: Any, accumulation: int) -> None:
    trainer = run(create, epochs=6, gradient_accumulation_steps=accumulation)
    assert len(trainer.noting.rates) == (18, 12)[accumulation - 1]
    assert trainer.noting.rates == [values[0] for values in rates(trainer.scheduler, len(trainer.noting.rates))]
    assert trainer.scheduler.get_last_lr() == [trainer.optimizer.param_groups[0]["lr"]]
    assert max(trainer.noting.rates) == 0.1
    assert len(set(trainer.noting.rates)) > 3


def check_ends_with_the_run(scheduler_class: Any, smallest: float) -> None:
    trainer = run(scheduler_class.create_scheduler_fn(lr_min=0.01), epochs=None, max_num_train_steps=11)
    assert trainer.scheduler.get_last_lr() == pytest.approx([smallest])
    assert trainer.scheduler.get_updated_values(10)[0] > smallest


def check_state_is_plain_and_small(create: Any) -> None:
    scheduler = create(make_optimizer())
    scheduler.step()
    state = scheduler.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert {"num_updates": 1, "base_lr_values": [0.1, 0.3]}.items() <= state.items()
    state["base_lr_values"].append(1.0)
    assert scheduler.base_lr_values == [0.1, 0.3]
    with pytest.raises(ValueError, match="has 3 parameter groups, but the optimizer has 2"):
        scheduler.load_state_dict(state)


def check_refused(create: Any, kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        create(make_optimizer(), **kwargs)
