"""The cosine schedule and the base classes: rates, states, layer decay; schedules after epochs, or of a metric."""

from __future__ import annotations

import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.schedulers import CosineLrScheduler, SchedulerBase, StatefulSchedulerBase
from pytorch_accel_lite.schedulers.schedule_arguments import NAMED_SCHEDULES
from pytorch_accel_lite.schedulers.schedule_preview import schedule_values
from tests import ancestor
from tests.launching import run_code, some_of
from tests.scripts.resumable import CopyStates
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_model,
    weights,
)

P = TrainerPlaceholderValues


def make_optimizer(*rates: float, **kwargs: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1, 0.3)]
    return torch.optim.SGD(groups, **kwargs)


def rates(scheduler: SchedulerBase, updates: int = 50) -> list[Any]:
    return [scheduler.get_updated_values(n) for n in range(updates)]


class Noting(TrainerCallback):
    """Records the learning rate of each update, and the weights after it."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}  # it notes what this process does

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def on_optimizer_step_start(self, trainer, **kwargs):
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])

    def on_train_step_end(self, trainer, **kwargs):
        self.weights[trainer.progress.update] = weights(trainer.get_model())


def run(factory: Any, *callbacks: Any, epochs: int | None = 4, seed: int | None = 5, **kwargs: Any) -> Any:
    """Train for epochs of 3 updates; data are in order, the optimizer has a state."""
    model, noting = make_model(), Noting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer: Any = Trainer(model, nn.MSELoss(), optimizer, callbacks=[noting, *callbacks], seed=seed)
    trainer.noting = noting
    data = {"train_dataset": make_data(6), "train_dataloader_kwargs": {"shuffle": False}, "per_device_batch_size": 2}
    trainer.train(num_epochs=epochs, create_scheduler_fn=factory, **(data | kwargs))
    return trainer


# ------------------------------------------------------------------------------------------- the rates

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


@pytest.fixture(scope="module")
def ancestors() -> dict[str, Any]:
    ancestor.skip_without_it()
    return json.loads(run_code(ANCESTOR, json.dumps([WSD_CASES, COSINE_CASES])).splitlines()[-1])


@pytest.mark.parametrize("case", range(len(COSINE_CASES)))
def test_cosine_has_the_ancestors_rates_until_it_breaks_off(ancestors, case):
    """With a warm-up, the ancestor drops to the smallest rate too early, by the length of the warm-up."""
    warmup, cooldown = (5 * COSINE_CASES[case].get(f"num_{part}_epochs", 0) for part in ("warmup", "cooldown"))
    last = 20 - cooldown - warmup if warmup else 50
    own = rates(CosineLrScheduler(make_optimizer(), **COSINE, **COSINE_CASES[case]))
    for mine, other in zip(own[:last], ancestors["cosine"][case]["values"][:last], strict=True):
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
    trainer = run(create, epochs=6, gradient_accumulation_steps=accumulation)
    assert len(trainer.noting.rates) == (18, 12)[accumulation - 1]
    assert trainer.noting.rates == [values[0] for values in rates(trainer.scheduler, len(trainer.noting.rates))]
    assert trainer.scheduler.get_last_lr() == [trainer.optimizer.param_groups[0]["lr"]]
    assert max(trainer.noting.rates) == 0.1
    assert len(set(trainer.noting.rates)) > 3


@pytest.mark.parametrize(("scheduler_class", "smallest"), [(CosineLrScheduler, 0.01)])
def test_a_schedule_ends_with_a_run_limited_to_some_updates(scheduler_class, smallest):
    trainer = run(scheduler_class.create_scheduler_fn(lr_min=0.01), epochs=None, max_num_train_steps=11)
    assert trainer.scheduler.get_last_lr() == pytest.approx([smallest])
    assert trainer.scheduler.get_updated_values(10)[0] > smallest


# ------------------------------------------------------------------------------------------------ by name


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"create_scheduler_fn": "cosin"},
            ValueError,
            "='cosin' is not the name of a schedule. Did you mean 'cosine'?",
        ),
        ({"create_scheduler_fn": "cosine_with_warmup"}, ValueError, "Did you mean 'cosine'?"),
        (
            {"create_scheduler_fn": "StepLR"},
            ValueError,
            r"pass a function such as functools.partial\(StepLR, step_size",
        ),
        ({"warmup_steps": 5}, ValueError, "warmup_steps=5 is for schedules by name, .* Pass 'constant', or"),
        ({"create_scheduler_fn": StepLR, "warmup_steps": 5}, ValueError, "Give your own scheduler its warm-up"),
    ],
)
def test_invalid_schedule_names_and_warm_ups_are_named(arguments, error, message):
    trainer = adamw_trainer(make_model())
    with pytest.raises(error, match=message):
        trainer.train(make_data(6), 1, **arguments)
    assert trainer.progress.update == 0


def test_without_its_extension_a_name_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(NAMED_SCHEDULES, "content", None)
    with pytest.raises(
        ValueError, match="create_scheduler_fn='cosine' belongs to the extension 'named_schedules', which is not"
    ):
        adamw_trainer(make_model()).train(make_data(6), 1, create_scheduler_fn="cosine")


# ------------------------------------------------------------------------------------ the base classes


class Halving(StatefulSchedulerBase):
    def get_updated_values(self, num_updates):
        return [value / 2**num_updates for value in self.base_lr_values]


def test_a_custom_schedule_is_stepped_and_kept_in_states(tmp_path):
    trainer = run(Halving, epochs=1)
    assert trainer.noting.rates == [0.1, 0.05, 0.025]
    trainer.save_training_state(tmp_path / "state")
    scheduler = Halving(make_optimizer(1.0))
    scheduler.load_state_dict(trainer.scheduler.state_dict())
    scheduler.step()
    assert scheduler.num_updates == 4
    assert scheduler.get_last_lr() == [0.1 / 16]


def test_scheduler_values_may_be_single_per_group_or_none():
    class Chosen(SchedulerBase):
        values: Any = None

        def get_updated_values(self, num_updates):
            return self.values

    optimizer = make_optimizer(momentum=0.9)
    scheduler = Chosen(optimizer, "momentum")
    for values, expected in ((None, [0.9, 0.9]), (0.5, [0.5, 0.5]), ((0.1, 0.2), [0.1, 0.2])):
        scheduler.values = values
        scheduler.step_update(3)
        assert scheduler.get_last_lr() == expected
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    assert optimizer.param_groups[0]["initial_momentum"] == 0.9
    scheduler.values = [1.0]
    with pytest.raises(ValueError, match="returned 1 values for 2 parameter groups"):
        scheduler.step_update(3)


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
    scheduler = create(make_optimizer())
    scheduler.step()
    state = scheduler.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert {"num_updates": 1, "base_lr_values": [0.1, 0.3]}.items() <= state.items()
    state["base_lr_values"].append(1.0)
    assert scheduler.base_lr_values == [0.1, 0.3]
    with pytest.raises(ValueError, match="has 3 parameter groups, but the optimizer has 2"):
        scheduler.load_state_dict(state)


def saved_run(folder: Path, factory: Any, *callbacks: Any, resume_from: Any = None, **kwargs: Any) -> Any:
    """A run that saves a training state after each update, in ``folder/states``."""
    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, save_at_end=False)
    return run(factory, saving, *callbacks, resume_from=resume_from, **kwargs)


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
    with pytest.raises(error, match=message):
        create(make_optimizer(), **kwargs)


def test_an_optimizer_that_does_not_fit_is_explained():
    with pytest.raises(TypeError, match="must be an instance of torch"):
        CosineLrScheduler(nn.Linear(1, 1), 1, 1)
    with pytest.raises(ValueError, match=r"param_group_field='betas' is not in the optimizer's .* 'momentum'"):
        Halving(make_optimizer(), "betas")


# --------------------------------------------------------------------------------- after epochs, on a metric


def test_a_scheduler_may_be_stepped_after_epochs():
    trainer = run(
        partial(StepLR, step_size=1, gamma=0.5), scheduler_interval="epoch", eval_dataset=make_data(4), epochs=3
    )
    assert trainer.noting.rates == [0.1] * 3 + [0.05] * 3 + [0.025] * 3
    assert trainer.scheduler.last_epoch == 3
    assert trainer.run_config.scheduler_interval == "epoch"


def test_placeholders_are_resolved_for_a_scheduler_of_epochs():
    trainer = run(partial(CosineAnnealingLR, T_max=P.NUM_EPOCHS), scheduler_interval="epoch", epochs=2)
    assert trainer.noting.rates == pytest.approx([0.1] * 3 + [0.05] * 3)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0)


class ScoresOfAScript(TrainerCallback):
    """Records a score at the end of each evaluation, and notes the rate at the end of each epoch."""

    scores = (5.0, 3.0, 4.0, 3.5, 1.0, 2.0)

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_eval_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric("score", self.scores[trainer.progress.epoch - 1])

    def on_training_run_epoch_end(self, trainer, **kwargs):
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])


EVAL_LOSS = "eval_loss_epoch"
PLATEAU: dict[str, Any] = {
    "factory": partial(ReduceLROnPlateau, factor=0.5, patience=0),
    "scheduler_interval": "epoch",
    "eval_dataset": make_data(4),
    "epochs": 6,
}


def test_a_plateau_scheduler_gets_the_metric_of_each_evaluation():
    scores = ScoresOfAScript()
    run(PLATEAU["factory"], scores, scheduler_metric="score", **{k: v for k, v in PLATEAU.items() if k != "factory"})
    assert scores.rates == [0.1, 0.1, 0.05, 0.025, 0.025, 0.0125]


def test_an_unrecorded_metric_is_an_error_that_lists_the_others():
    error = pytest.raises(ValueError, match=r"scheduler_metric='eval_los_epoch'.*'eval_loss_epoch'.*train_loss_epoch")
    with pytest.warns(UserWarning, match=r"unless Noting does. Did you mean 'eval_loss_epoch'\?"), error:
        run(**PLATEAU, scheduler_metric="eval_los_epoch")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")  # resumed right before an epoch's evaluation
@pytest.mark.parametrize(
    "stepping",
    some_of(
        [
            {
                **PLATEAU,
                "factory": partial(ReduceLROnPlateau, threshold=0.2, patience=0),
                "scheduler_metric": EVAL_LOSS,
            },
            {**PLATEAU, "factory": partial(StepLR, step_size=1, gamma=0.5)},
        ]
    ),
)
def test_a_schedule_stepped_after_epochs_resumes_its_bits(tmp_path, stepping):
    def train(folder, *callbacks, resume_from=None):
        saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, save_every_n_epochs=1)
        return run(stepping["factory"], saving, *callbacks, resume_from=resume_from, **options)

    options = {name: value for name, value in stepping.items() if name != "factory"}
    whole = train(tmp_path, CopyStates(tmp_path))
    copies = sorted((tmp_path / "copies").glob("*/update-*"))
    assert len(copies) == 18 + 6  # after updates, and after epochs
    assert len(set(whole.noting.rates)) > 1
    for copy in some_of(copies):
        resumed = train(tmp_path / copy.parent.name, resume_from=copy)
        assert resumed.noting.rates == whole.noting.rates[18 - len(resumed.noting.rates) :]
        assert equal_weights(weights(resumed.model), weights(whole.model))
        assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
        assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_a_schedule_of_a_metric_steps_when_it_was_measured():
    model = float64_model()
    trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []

    class Follows(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            seen.append(metrics)
            super().step(metrics, epoch)

    trainer.train(
        float64_data(16),
        5,
        float64_data(9),
        create_scheduler_fn=Follows,
        scheduler_interval="epoch",
        scheduler_metric="eval_loss_epoch",
        eval_every_n_epochs=2,
    )
    assert seen == trainer.run_history.get_metric_values("eval_loss_epoch")
    assert len(seen) == 3


def test_plot_schedule_shows_groups_and_timm_schedules():
    from timm.scheduler import StepLRScheduler

    assert schedule_values(partial(StepLRScheduler, decay_t=1, decay_rate=0.5), 6, [1.0, 0.1], num_epochs=3) == [
        [1, 1, 0.5, 0.5, 0.25, 0.25], [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    ]  # fmt: skip
    ours = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1, warmup_starting_lr=0.01)
    (values,) = schedule_values(ours, 10, 0.1, num_epochs=5)
    assert max(values) == pytest.approx(0.1)
    assert values[0] < values[1] <= values[2] > values[-1]


@pytest.mark.parametrize("rate", [np.float32(0.5), np.int64(1), torch.tensor(0.5), np.array([0.5, 1.0])], ids=repr)
def test_previews_accept_rates_of_numpy_and_torch(rate):
    values = schedule_values(partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), 2, rate)
    assert [group[0] for group in values] == np.atleast_1d(np.asarray(rate)).tolist()


def test_previews_name_a_rate_that_is_none():
    with pytest.raises(TypeError, match=r"^lr='high' must be a number, or a list"):
        schedule_values(partial(torch.optim.lr_scheduler.StepLR, step_size=1), 2, "high")
