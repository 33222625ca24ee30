"""Advice printed after the first epoch, and no output if nothing stands out."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import AdviceCallback, LogMetricsCallback
from pytorch_accel_lite.schedulers import CosineLrScheduler
from tests.ranks import rank, world_size
from tests.small_models import (
    CountsReads,
    Overflows,
    Rows,
    adamw_trainer,
    equal_weights,
    fake_clock,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_model,
    make_trainer,
    train,
    weights,
)

NAP = 0.01


class SlowRows(Rows):
    def __getitem__(self, index: int) -> Any:
        time.sleep(NAP)
        return super().__getitem__(index)


def advice(text: str) -> list[str]:
    """The lines of advice in the output of a run."""
    return [line[2:] for line in text.splitlines() if line.startswith("- ")]


@pytest.mark.usefixtures("sleep_passes_time")
def test_nothing_is_printed_when_nothing_stands_out(capsys):
    train(
        make_trainer([AdviceCallback]),
        epochs=3,
        eval_dataset=True,
        gradient_clip_norm=1e9,
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    )
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("sleep_passes_time")
def test_waiting_for_data_is_reported_once_after_the_metrics(capsys):
    trainer = make_trainer([AdviceCallback(min_seconds=0.01), LogMetricsCallback])
    train(trainer, epochs=3, train_dataset=SlowRows(make_data()), train_dataloader_kwargs={"num_workers": 0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Advice after epoch 1:"
    (said,) = advice("\n".join(lines))
    assert said.startswith("The model waited for data for 0.")
    cores = len(os.sched_getaffinity(0))
    assert f"Use workers, num_workers={min(cores, 8)} in train_dataloader_kwargs or in your DataLoader" in said


@pytest.mark.usefixtures("sleep_passes_time")
def test_waiting_is_compared_with_the_time_of_training(capsys, monkeypatch):
    monkeypatch.setattr(time, "monotonic", time.perf_counter)
    slow = listener(on_eval_step_start=lambda _: time.sleep(100 * NAP))
    trainer = make_trainer([AdviceCallback(min_seconds=NAP), slow])
    kwargs = {"train_dataset": SlowRows(make_data()), "train_dataloader_kwargs": {"num_workers": 0}}
    train(trainer, eval_dataset=make_data(), evaluate_every="1 updates", **kwargs)
    assert " of 0.1 seconds" in capsys.readouterr().out


def learnable(size: int = 512) -> TensorDataset:
    inputs = make_data(size).tensors[0]
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class OwnStep(Trainer):
    def train_step(self, batch):
        return super().train_step(batch)


def learner(rate: float, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    model = make_model()
    return make_trainer([AdviceCallback], model, kind, optimizer=torch.optim.SGD(model.parameters(), rate, **options))


FALLING = {
    "falls": (0.01, Trainer, {}),
    "falls in the first updates": (0.1, Trainer, {}),
    "too few updates to tell": (1e-9, Trainer, {"max_num_train_steps": 47}),
    "a step of one's own": (1e-9, OwnStep, {}),
}


@pytest.mark.parametrize(
    ("rate", "kind", "arguments"),
    [
        pytest.param(*values, id=name, marks=pytest.mark.extension("manual_optimization") if OwnStep in values else ())
        for name, values in FALLING.items()
    ],
)
def test_a_falling_or_low_loss_is_not_mentioned(capsys, rate, kind, arguments):
    train(learner(rate, kind), train_dataset=learnable(), **arguments)
    assert capsys.readouterr().out == ""


@pytest.mark.extension("manual_optimization")
def test_a_subclass_that_hears_each_step_compares_no_more_losses(capsys):
    class Hears(AdviceCallback):
        def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
            super().on_train_step_end(trainer, batch, batch_output, **kwargs)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    train(make_trainer([Hears], model, OwnStep, optimizer=optimizer), train_dataset=learnable(128))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("options", [{"rate": 1e-9}, {"rate": 1e-3, "maximize": True}], ids=["stays", "rises"])
def test_a_loss_that_does_not_fall_suggests_check(capsys, options):
    trainer = learner(**options)
    train(trainer, train_dataset=learnable(128))
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Advice after epoch 1: - The training loss has not fallen: it was ")
    assert "trainer.check(train_dataset) looks for mistakes in the program" in text
    train(trainer, train_dataset=learnable())  # its weights may be trained already
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("trained", [False, True])
def test_a_trained_network_need_not_improve(capsys, trained):
    data = learnable(128)
    model = torch.nn.Linear(data.tensors[0].shape[1], 1)
    torch.nn.init.constant_(model.weight, 0.9 if trained else 0.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    make_trainer([AdviceCallback], model, optimizer=optimizer).train(data, 3, per_device_batch_size=2)
    assert ("has not fallen" in capsys.readouterr().out) == (not trained)


@pytest.mark.usefixtures("sleep_passes_time")
def test_short_waits_are_not_reported(capsys):
    train(make_trainer([AdviceCallback]), train_dataset=SlowRows(make_data()))
    assert capsys.readouterr().out == ""


def test_mostly_clipped_updates_are_reported(capsys):
    train(make_trainer([AdviceCallback]), gradient_clip_norm=1e-6, epochs=2)
    (said,) = advice(capsys.readouterr().out)
    assert said.startswith("100% of the updates were clipped: gradient_clip_norm=1e-06 is below the average")


def test_updates_skipped_by_callbacks_are_reported(capsys):
    skip = listener(on_optimizer_step_start=lambda t: t.skip_update() if t.progress.update == 1 else None)
    train(make_trainer([skip, AdviceCallback]), epochs=2)
    assert advice(capsys.readouterr().out) == ["1 of 3 updates were skipped by callbacks."]


def test_updates_skipped_by_the_scaler_are_reported(scaled_accelerator, capsys):
    train(make_trainer([AdviceCallback], trainer_class=Overflows, accelerator=scaled_accelerator), epochs=2)
    (said,) = advice(capsys.readouterr().out)
    assert said.startswith("1 of 3 updates were skipped: their gradients overflowed in fp16.")
    assert "bf16" in said


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_a_schedule_in_epochs_that_is_stepped_after_updates(lr, capsys):
    optimizer = partial(torch.optim.SGD, lr=lr)
    train(make_trainer([AdviceCallback], optimizer=optimizer), epochs=2, size=12, create_scheduler_fn=decay)
    (text,) = advice(capsys.readouterr().out)
    assert text.startswith("StepLR has already lowered the learning rate from 0.1 to 1e-06 in this epoch.")
    assert "scheduler_interval='epoch'" in text


@pytest.mark.parametrize("arguments", [
    {"epochs": 2, "scheduler_interval": "epoch"},
    {"epochs": 1},  # ends with the run
    {"epochs": None, "max_num_train_steps": 3},
])  # fmt: skip
def test_a_schedule_that_reaches_its_end_gets_no_advice(arguments, capsys):
    train(make_trainer([AdviceCallback]), create_scheduler_fn=decay, **arguments)
    assert capsys.readouterr().out == ""


def test_a_warm_up_that_has_hardly_begun_is_reported(capsys):
    scheduler = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1, warmup_starting_lr=1e-9, total_num_epochs=2)
    slow = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=900, warmup_starting_lr=1e-9, total_num_epochs=1000)
    train(make_trainer([AdviceCallback]), epochs=2, create_scheduler_fn=scheduler)
    assert capsys.readouterr().out == ""
    train(make_trainer([AdviceCallback]), epochs=2, create_scheduler_fn=slow)
    (said,) = advice(capsys.readouterr().out)
    assert "CosineLrScheduler has raised the learning rate to only" in said


COSINE = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)


def said_in(trainer: Trainer, capsys: Any, **kwargs: Any) -> str:
    capsys.readouterr()
    train(trainer, **kwargs)
    return capsys.readouterr().out


def test_a_rate_of_0_for_a_whole_epoch_is_reported(capsys):
    trainer = learner(0.1)
    train(trainer, epochs=2, create_scheduler_fn=COSINE)
    before = weights(trainer.model)
    said = said_in(trainer, capsys, epochs=1)
    assert "The learning rate was 0 throughout this epoch, so no weight has changed. Set 'lr'" in said
    assert equal_weights(before, weights(trainer.model))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (lambda epoch: 0.0, "LambdaLR keeps it there"),
        (lambda epoch: 0.5 * epoch, "The next rate of LambdaLR is 0.05: start"),
    ],
)
def test_a_schedule_that_stays_at_0_is_not_a_warm_up(shape, expected, capsys):
    trainer = learner(0.1)
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=shape)
    said = said_in(trainer, capsys, create_scheduler_fn=schedule, scheduler_interval="epoch")
    assert f"no weight has changed. {expected}" in said
    assert "warm-up" not in said or "start its warm-up above 0" in said


def test_advice_ignores_frozen_groups_if_another_trains(capsys):
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.1}]
    for schedule in (None, COSINE):
        trainer = make_trainer([AdviceCallback], model, optimizer=torch.optim.SGD(groups))
        assert "The learning rate was 0" not in said_in(trainer, capsys, create_scheduler_fn=schedule)


def test_a_schedule_that_restarts_each_epoch_gets_no_advice(capsys):
    def restart(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30)

    train(make_trainer([AdviceCallback]), epochs=3, size=60, create_scheduler_fn=restart)
    assert capsys.readouterr().out == ""


class NoRate(torch.optim.Optimizer):
    """An optimizer without learning rates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None: ...


class Constant:
    """A schedule that sets no learning rate."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_missing_information_gives_no_advice(capsys):
    model = make_model()
    train(make_trainer([AdviceCallback], model, optimizer=NoRate(model.parameters())), epochs=2)
    create = {"create_scheduler_fn": lambda optimizer: Constant()}
    train(make_trainer([AdviceCallback], model, optimizer=NoRate(model.parameters())), epochs=2, **create)

    def replace(trainer: Any) -> None:
        trainer._train_dataloader = [(torch.ones(2, 4), torch.ones(2, 1))] * 3

    train(make_trainer([listener(on_training_run_start=replace), AdviceCallback]), epochs=2)
    assert capsys.readouterr().out == ""


def test_a_custom_clipping_is_judged_by_the_norm(capsys):
    class Own(Trainer):
        def clip_gradients(self) -> None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)

    train(make_trainer([AdviceCallback], trainer_class=Own), epochs=2, gradient_clip_norm=1e-6)
    assert "100% of the updates were clipped" in capsys.readouterr().out


def test_no_number_is_read_in_a_step():
    def reads(callbacks: list[Any]) -> int:
        with CountsReads() as counter:
            train(make_trainer(callbacks), epochs=1, size=40, gradient_clip_norm=0.01)
        return counter.reads

    assert reads([AdviceCallback]) - reads([]) <= 2


def test_weights_are_the_same_with_advice():
    first, second = (train(make_trainer(callbacks), epochs=2) for callbacks in ([], [AdviceCallback(0)]))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_advice_refuses_invalid_time_limits(seconds):
    with pytest.raises(ValueError, match=f"min_seconds={seconds} must be at least 0"):
        AdviceCallback(min_seconds=seconds)


def slow_to_read() -> None:
    """Train while each sample takes 10 ms on rank 1."""

    class Slow(Rows):
        def __getitem__(self, index: int) -> Any:
            pass_time(0.01 if rank() == 1 else 0.0)
            return super().__getitem__(index)

    trainer = adamw_trainer(float64_model(), callbacks=[AdviceCallback(min_seconds=0.05)])
    data = Slow(float64_data(30 * world_size()))
    with fake_clock() as pass_time:
        trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 0})


def test_a_process_that_reads_more_slowly_is_named_in_the_advice(two_ranks):
    assert "Rank 1 waited for data for" in two_ranks(slow_to_read).output
