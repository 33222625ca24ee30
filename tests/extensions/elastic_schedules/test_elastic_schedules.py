"""Resuming with another number of updates per epoch: the schedule continues at the position of the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues, TrainerWithTimmScheduler, schedulers
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.schedulers import StatefulSchedulerBase
from tests.launching import SOAK, some_of
from tests.ranks import world_size
from tests.small_models import float64_data

SAMPLES = 60


EPOCHS = 4


class Rates(TrainerCallback):
    """Records the learning rate and the position in the run of each update."""

    saves_attributes = False  # those of a run alone

    def __init__(self) -> None:
        self.curve: list[Any] = []

    def on_optimizer_step_start(self, trainer, **kwargs):
        group = trainer.optimizer.param_groups[0]
        done = trainer.progress.epochs_completed + (trainer.progress.samples_in_epoch - 1) / SAMPLES
        self.curve.append((done, float(group["lr"])))


@dataclass
class Trained:
    """A run with a schedule. Positions are in epochs of samples."""

    trainer: Trainer
    states: Path
    curve: list[tuple[float, float]]

    @property
    def rates(self) -> list[float]:
        return [rate for _, rate in self.curve]

    @property
    def last_rate(self) -> float:
        return float(self.trainer.optimizer.param_groups[0]["lr"])

    @property
    def per_epoch(self) -> int:
        return self.trainer.run_config.num_update_steps_per_epoch


def trained_with(
    create: Any,
    batch: int,
    accumulation: int,
    folder: Path,
    trainer_class: type[Trainer] = Trainer,
    resume: Path | None = None,
    *,
    save_every: int = 1000,
    save_epochs: int | None = None,
    epochs: int | None = EPOCHS,
    samples: int = SAMPLES,
    limit: TrainerCallback | None = None,
    **kwargs: Any,
) -> Trained:
    """Train with a schedule, from a state if one is given, and save a state every few updates."""
    torch.manual_seed(0)
    model, rates = nn.Linear(5, 1).double(), Rates()
    saving = SaveTrainingStateCallback(folder / "states", save_epochs, save_every, save_at_end=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = trainer_class(model, nn.MSELoss(), optimizer, [rates, saving, *filter(None, [limit])], seed=3)
    trainer.train(
        float64_data(samples),
        epochs,
        per_device_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        create_scheduler_fn=create,
        resume_from=resume,
        **kwargs,
    )
    return Trained(trainer, folder / "states", rates.curve)


pytestmark = pytest.mark.filterwarnings("ignore:The training state holds the state of callback")

P = TrainerPlaceholderValues
TOTAL, PER_EPOCH = P.MAX_NUM_TRAIN_STEPS, P.NUM_UPDATE_STEPS_PER_EPOCH


def warm_up_and_cosine(optimizer: Any, warmup: int, total: int) -> Any:
    parts = [LinearLR(optimizer, 0.1, total_iters=warmup), CosineAnnealingLR(optimizer, total - warmup)]
    return SequentialLR(optimizer, parts, [warmup])


class OwnCosine(StatefulSchedulerBase):
    """A schedule of the user's, with a length among its attributes."""

    def __init__(self, optimizer: Any, total: int) -> None:
        super().__init__(optimizer)
        self.total = total

    def get_updated_values(self, num_updates: int) -> list[float]:
        return [value * (1 - num_updates / self.total) for value in self.base_lr_values]


def timms(name: str, **kwargs: Any) -> Any:
    return lambda: partial(getattr(pytest.importorskip("timm.scheduler"), name), **kwargs)


TORCH = {
    "cosine": partial(CosineAnnealingLR, T_max=TOTAL),
    "one cycle": partial(OneCycleLR, max_lr=0.5, total_steps=TOTAL),
    "one cycle by epochs": partial(OneCycleLR, max_lr=0.5, epochs=P.NUM_EPOCHS, steps_per_epoch=PER_EPOCH),
    "polynomial": partial(PolynomialLR, total_iters=TOTAL, power=2.0),
    "steps": partial(StepLR, step_size=PER_EPOCH, gamma=0.5),
    "sequence": partial(warm_up_and_cosine, warmup=PER_EPOCH, total=TOTAL),
}
OURS = {"own": partial(OwnCosine, total=TOTAL)}
if "WSDLrScheduler" in schedulers.__all__:  # otherwise its extension has been deleted
    options = {"num_warmup_epochs": 1, "decay_phase_ratio": 0.5, "num_checkpoints": 2}
    cosine = schedulers.CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1, num_cooldown_epochs=0.5)
    OURS["our cosine"] = cosine
    OURS["wsd"] = schedulers.WSDLrScheduler.create_scheduler_fn(**options)
UPDATES = {"t_in_epochs": False, "warmup_t": PER_EPOCH, "warmup_lr_init": 1e-3, "warmup_prefix": True}
TIMMS = {
    "timm's cosine": timms("CosineLRScheduler", t_initial=TOTAL - PER_EPOCH, **UPDATES),
    "timm's polynomial": timms("PolyLRScheduler", t_initial=TOTAL - PER_EPOCH, **UPDATES),
    "timm's cosine in epochs": timms("CosineLRScheduler", t_initial=P.NUM_EPOCHS, warmup_t=1, warmup_lr_init=1e-3),
}


def factory_of(name: str) -> tuple[Any, type[Trainer]]:
    if name in TIMMS:
        return TIMMS[name](), TrainerWithTimmScheduler
    return {**TORCH, **OURS}[name], Trainer


# Batch sizes and accumulation before and after, and the update of which the state is, within an epoch or at its end.
CHANGES = [((4, 1), (2, 1), 17), ((4, 1), (8, 1), 30), ((4, 1), (7, 1), 22), ((2, 2), (3, 4), 10), ((8, 1), (2, 3), 3)]


# Each schedule with one of the changes in turn, and each of these with several schedules; with SOAK all.
SCHEDULES_AND_CHANGES = [
    (name, *change)
    for number, name in enumerate([*TORCH, *OURS, *TIMMS])
    for change in (CHANGES if SOAK else (CHANGES[number % 5],))
]


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(("name", "before", "after", "update"), SCHEDULES_AND_CHANGES)
def test_a_schedule_continues_where_the_run_is_and_ends_with_it(tmp_path, name, before, after, update):
    create, trainer_class = factory_of(name)
    first = trained_with(create, *before, tmp_path / "first", trainer_class, save_every=update)
    resumed = trained_with(create, *after, tmp_path / "again", trainer_class, first.states / f"update-{update:09d}")
    whole = trained_with(create, *after, tmp_path / "whole", trainer_class)
    assert resumed.trainer.progress.samples == whole.trainer.progress.samples == EPOCHS * SAMPLES
    left = len(resumed.rates)
    # From the next epoch on, the rates are those of a run that was like that from its start.
    rest = min(left, EPOCHS * whole.per_epoch - (-(-update // first.per_epoch)) * whole.per_epoch)
    assert rest > 0
    assert resumed.rates[left - rest :] == pytest.approx(whole.rates[-rest:], rel=1e-12)
    assert resumed.last_rate == pytest.approx(whole.last_rate, rel=1e-12, abs=1e-15)
    # The first rate is one that the schedule has about there.
    near = [rate for place, rate in first.curve if abs(place - resumed.curve[0][0]) < 1 / first.per_epoch]
    near += [rate for place, rate in whole.curve if abs(place - resumed.curve[0][0]) < 1 / whole.per_epoch]
    assert min(near) * 0.99 <= resumed.rates[0] <= max(near) * 1.01


@pytest.mark.thorough
@pytest.mark.extension("named_schedules")
def test_a_run_resumed_on_other_processes_resumes_again(tmp_path):
    for name in ("one cycle", "our cosine", "timm's cosine"):
        create, trainer_class = factory_of(name)
        folder = tmp_path / name.replace(" ", "-")
        first = trained_with(create, 4, 1, folder / "first", trainer_class, save_every=17)
        state = first.states / "update-000000017"
        second = trained_with(create, 2, 1, folder / "second", trainer_class, state, save_every=37)
        third = trained_with(create, 2, 1, folder / "third", trainer_class, second.states / "update-000000037")
        assert third.rates == second.rates[37 - 17 :]
        back = trained_with(create, 4, 1, folder / "back", trainer_class, second.states / "update-000000074")
        assert back.rates[-10:] == pytest.approx(first.rates[-10:], rel=1e-12)


def test_equal_epoch_lengths_restore_the_schedules_state(tmp_path, capsys):
    first = trained_with(TORCH["one cycle"], 4, 1, tmp_path / "first", save_every=17)
    resumed = trained_with(TORCH["one cycle"], 2, 2, tmp_path / "again", resume=first.states / "update-000000017")
    assert resumed.rates == first.rates[17:]
    assert "created again" not in capsys.readouterr().out


def test_a_schedule_continues_from_a_completed_epoch(tmp_path):
    create = TORCH["one cycle"]
    first = trained_with(create, 4, 1, tmp_path / "first", save_epochs=2)
    resumed = trained_with(create, 2, 1, tmp_path / "again", resume=first.states / "update-000000030")
    whole = trained_with(create, 2, 1, tmp_path / "whole")
    assert resumed.rates == pytest.approx(whole.rates[60:], rel=1e-12)


def test_a_run_limited_by_updates_counts_on(tmp_path):
    limit = {"epochs": None, "max_num_train_steps": 40}
    create = partial(OneCycleLR, max_lr=0.5, total_steps=TOTAL)
    first = trained_with(create, 4, 1, tmp_path / "first", save_every=17, **limit)
    resumed = trained_with(create, 3, 1, tmp_path / "again", resume=first.states / "update-000000017", **limit)
    assert resumed.rates == first.rates[17:]


def test_a_resumed_run_prints_how_its_schedule_continues(tmp_path, capsys):
    first = trained_with(TORCH["cosine"], 4, 1, tmp_path / "first", save_every=17)
    trained_with(TORCH["cosine"], 2, 1, tmp_path / "again", resume=first.states / "update-000000017")
    said = "The run is resumed with 30 updates in an epoch instead of 15, so its schedule is created again and advanced"
    assert f"{said} to update 34 of 120." in capsys.readouterr().out


@pytest.mark.extension("pytorch_accelerated")
@pytest.mark.parametrize("samples", [SAMPLES, 500])
def test_a_schedule_continues_within_limited_epochs(tmp_path, capsys, samples):
    from pytorch_accel_lite.callbacks import LimitBatchesCallback

    limited = {"limit": LimitBatchesCallback(8), "samples": samples}
    first = trained_with(TORCH["cosine"], 2, 1, tmp_path / "first", save_every=6, **limited)
    assert first.per_epoch == 8
    state = first.states / "update-000000006"
    resumed = trained_with(TORCH["cosine"], 2, 2, tmp_path / "again", resume=state, **limited)
    assert "advanced to update 3 of 16." in capsys.readouterr().out
    whole = trained_with(TORCH["cosine"], 2, 2, tmp_path / "whole", **limited)
    assert resumed.rates == pytest.approx(whole.rates[3:], rel=1e-12)


# --------------------------------------------------------------------- what cannot be advanced so is an error


class StepsItself(Trainer):
    def scheduler_step(self) -> None:
        self.scheduler.step()


class SaysHow(StepsItself):
    def advance_scheduler(self, num_updates: int) -> None:
        for _ in range(num_updates):
            self.scheduler.step()


def refuse_resume(folder: Path, create: Any, update: int, message: str, trainer_class: type[Trainer] = Trainer) -> None:
    first = trained_with(create, 4, 1, folder / "first", trainer_class, save_every=update)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=message):
        trained_with(create, 2, 1, folder / "again", trainer_class, first.states / f"update-{update:09d}", save_every=1)
    made = set(folder.rglob("*")) - set(before)
    assert not [path for path in made if path.name.startswith("update-")]  # it made no update


def test_a_schedule_of_a_fixed_length_that_jumps_is_an_error(tmp_path):
    create = partial(StepLR, step_size=20)
    refuse_resume(
        tmp_path, create, 50, r"But StepLR has learning rates from .* near there, and the run had 0\.001.*NUM_UPDATE"
    )


def test_a_one_cycle_schedule_of_a_fixed_length_is_an_error(tmp_path):
    create = partial(OneCycleLR, max_lr=0.5, total_steps=60)
    refuse_resume(tmp_path, create, 17, "OneCycleLR has total_steps=60, but the run steps it 120 times")


def test_an_ended_one_cycle_schedule_says_how_to_train_longer(tmp_path):
    first = trained_with(TORCH["one cycle"], 4, 1, tmp_path / "first", save_every=EPOCHS * 15)
    state = first.states / f"update-{EPOCHS * 15:09d}"
    with pytest.raises(
        ValueError,
        match=r"has a OneCycleLR of \d+ steps.* A resumed schedule stays as long as it was.*load_optimizer=False",
    ):
        trained_with(TORCH["one cycle"], 4, 1, tmp_path / "again", resume=state, epochs=EPOCHS + 1)
    first.trainer.load_checkpoint(state / "model.safetensors")


def test_a_scheduler_that_fails_when_it_is_stepped_is_an_error(tmp_path):
    def rate(update: int) -> float:
        return ([1.0] * 61)[update]

    refuse_resume(tmp_path, partial(LambdaLR, lr_lambda=rate), 40, "which failed: list index out of range")


def test_an_overridden_scheduler_step_must_say_how_to_advance(tmp_path):
    refuse_resume(
        tmp_path, TORCH["cosine"], 17, "StepsItself.scheduler_step is overridden, so how to advance", StepsItself
    )
    expected = trained_with(TORCH["cosine"], 2, 1, tmp_path / "whole")
    first = trained_with(TORCH["cosine"], 4, 1, tmp_path / "other", SaysHow, save_every=15)
    state = first.states / "update-000000015"
    assert trained_with(TORCH["cosine"], 2, 1, tmp_path / "b", SaysHow, state).rates == expected.rates[30:]


def test_overriding_how_to_advance_may_keep_counting(tmp_path):
    class Counts(Trainer):
        def advance_scheduler(self, num_updates: int) -> None:
            super().advance_scheduler(self.progress.update)

    create = partial(StepLR, step_size=20)
    first = trained_with(create, 4, 1, tmp_path / "first", Counts, save_every=50)
    resumed = trained_with(create, 2, 1, tmp_path / "again", Counts, first.states / "update-000000050")
    assert resumed.rates[:10] == pytest.approx([1e-3] * 10)
    assert resumed.rates[10] == pytest.approx(1e-4)


# ------------------------------------------------------------------------------------ on several processes


def save_with_schedule(folder: Path, name: str) -> None:
    create, trainer_class = factory_of(name)
    trained_with(create, 4, 1, folder / "first", trainer_class, save_every=11)


def resume_with_schedule(folder: Path, name: str, state: Path) -> Any:
    """Return the learning rates of the resumed run, and its last one."""
    create, trainer_class = factory_of(name)
    trained = trained_with(create, 4, 1, folder / f"on-{world_size()}", trainer_class, state)
    return {"rates": trained.rates, "last": trained.last_rate}


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize("name", some_of(["one cycle", "timm's cosine", "our cosine"]))
def test_a_schedule_continues_on_other_numbers_of_processes(tmp_path, job, name):
    """Saved by 2 processes, resumed by 3 and by 1."""
    create, trainer_class = factory_of(name)
    job(2).run(save_with_schedule, tmp_path, name)
    state = tmp_path / "first" / "states" / "update-000000011"
    alone = resume_with_schedule(tmp_path, name, state)
    assert len(alone["rates"]) == EPOCHS * 15 - (15 + 24 // 4)
    for found, processes in [
        (alone, 1),
        *[(result, 3) for result in job(3).run(resume_with_schedule, tmp_path, name, state)],
    ]:
        whole = trained_with(create, 4 * processes, 1, tmp_path / f"whole-{processes}", trainer_class)
        rest = EPOCHS * whole.per_epoch - 2 * whole.per_epoch
        assert found["rates"][-rest:] == pytest.approx(whole.rates[-rest:], rel=1e-12)
        assert found["last"] == pytest.approx(whole.last_rate, rel=1e-12, abs=1e-15)


def test_a_run_resumes_right_before_and_after_a_warm_restart(tmp_path):
    restarts = partial(CosineAnnealingWarmRestarts, T_0=PER_EPOCH)
    saved = trained_with(restarts, 5, 1, tmp_path / "saved", save_every=1)
    per_epoch = saved.per_epoch
    for update in (per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch - 1):
        for batch in (3, 10, 30):
            state = saved.states / f"update-{update:09d}"
            trained = trained_with(restarts, batch, 1, tmp_path / f"{update}-{batch}", resume=state)
            assert trained.last_rate == pytest.approx(0.1)  # it ends where the next restart begins
