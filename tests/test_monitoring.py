"""What monitoring callbacks record is what can be computed by hand, and costs no read in a step."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import (
    AdviceCallback,
    DeviceMemoryCallback,
    GradientNormCallback,
    LearningRateMonitorCallback,
    ProgressBarCallback,
    ProgressTableCallback,
    RunLogCallback,
    SaveTrainingStateCallback,
    ThroughputCallback,
)
from tests.tasks import listener, make_model, make_trainer, train


def test_learning_rates_are_those_that_the_updates_were_made_with():
    seen: list[Any] = []
    look = listener(on_optimizer_step_end=lambda t: seen.append(t.step_metrics["lr"]))
    trainer = make_trainer([LearningRateMonitorCallback, look])
    halve = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    train(trainer, epochs=2, create_scheduler_fn=halve)
    assert seen == [0.1 * 0.5**i for i in range(6)]
    assert trainer.run_history.get_metric_values("lr") == [seen[2], seen[5]]


def test_each_group_has_its_learning_rate():
    model = make_model()
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in ((model[0], 0.1), (model[2], 0.01))]
    trainer = train(make_trainer([LearningRateMonitorCallback], model=model, optimizer=torch.optim.SGD(groups)))
    assert [trainer.run_history.get_latest_metric(name) for name in ("lr_0", "lr_1")] == [0.1, 0.01]


def test_a_monitor_names_the_groups_of_the_trainer_that_uses_it():
    monitor = LearningRateMonitorCallback()
    for names in ("ab", "cd"):
        model = make_model()
        parts = zip(names, (model[0], model[2]), strict=True)
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in parts}
        trainer = train(make_trainer([monitor], model=model, optimizer=optimizers))
        recorded = [name for name in trainer.run_history.get_metric_names() if name.startswith("lr")]
        assert sorted(recorded) == [f"lr_{name}" for name in names]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradient_norms_are_those_before_clipping(clip):
    norms: list[float] = []

    class Norms(Trainer):
        def clip_gradients(self):
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.model.parameters()])))
            super().clip_gradients()

    trainer = make_trainer([GradientNormCallback], trainer_class=Norms)
    train(trainer, gradient_clip_norm=clip, eval_dataset=True)
    values = {name: trainer.run_history.get_metric_values(name) for name in trainer.run_history.get_metric_names()}
    assert values["gradient_norm_mean"] == [pytest.approx(sum(norms) / 3)]
    assert values["gradient_norm_max"] == [pytest.approx(max(norms))]
    assert float(trainer.step_metrics["gradient_norm"]) == pytest.approx(norms[-1])
    if clip is None:
        assert "clipped_updates" not in values
    else:
        assert values["clipped_updates"] == [sum(norm > clip for norm in norms) / 3]
        assert values["clipped_updates"][0] > 0


def test_an_epoch_that_was_resumed_has_the_norms_of_all_its_updates(tmp_path):
    def run(**kwargs: Any) -> dict[str, Any]:
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        trainer = make_trainer([GradientNormCallback, saving], seed=0)
        train(trainer, epochs=1, gradient_clip_norm=0.5, **kwargs)
        return trainer.run_history.to_dict()

    whole = run()
    assert run(resume_from=tmp_path / "update-000000002") == whole


class Counted(Trainer):
    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch) | {"num_items_in_batch": torch.tensor(7)}


def test_throughput_counts_samples_and_items():
    rates: list[float] = []
    look = listener(on_optimizer_step_end=lambda t: rates.append(t.step_metrics["samples_per_second"]))
    trainer = make_trainer([ThroughputCallback, look], trainer_class=Counted)
    train(trainer, epochs=2)
    samples, items = (
        trainer.run_history.get_metric_values(f"{name}_per_second_epoch") for name in ("samples", "items")
    )
    assert [i / s for i, s in zip(items, samples, strict=True)] == [pytest.approx(3 * 7 / 6)] * 2
    assert len(rates) == 6
    assert min(rates) > 0
    plain = train(make_trainer([ThroughputCallback]))
    assert "items_per_second_epoch" not in plain.run_history.get_metric_names()


def test_memory_is_recorded_in_mebibytes():
    trainer = train(make_trainer([DeviceMemoryCallback]), epochs=2)
    used = trainer.run_history.get_metric_values("memory_resident_mib")
    assert len(used) == 2
    assert 50 < used[0] <= used[1] < 100_000


def test_an_epoch_of_whose_updates_none_was_seen_has_no_norms(tmp_path):
    def run(*callbacks: Any, **kwargs: Any) -> Any:
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        return train(make_trainer([saving, *callbacks], seed=0), epochs=2, **kwargs)

    run()
    with pytest.warns(UserWarning, match="nothing for the callback 'GradientNormCallback'"):
        resumed = run(GradientNormCallback(), resume_from=tmp_path / "update-000000003")
    assert len(resumed.run_history.get_metric_values("gradient_norm_max")) == 1
    assert len(resumed.run_history.get_metric_values("train_loss_epoch")) == 2


def test_the_largest_norm_remembers_one_that_was_no_number():
    def spoil(trainer: Any) -> None:
        if trainer.progress.update == 1:
            next(trainer.model.parameters()).grad.fill_(float("nan"))

    spoiler = listener(on_backward_end=lambda t, **kwargs: spoil(t))
    skip = listener(on_optimizer_step_start=lambda t: t.skip_update() if t.progress.update == 1 else None)
    trainer = train(make_trainer([spoiler, skip, GradientNormCallback]))
    assert math.isnan(trainer.run_history.get_latest_metric("gradient_norm_max"))


def test_a_window_without_updates_is_refused():
    with pytest.raises(ValueError, match="window=0"):
        ThroughputCallback(0)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_optimizers_without_a_rate_are_trained_with_what_shows_rates(defaults, tmp_path):
    class FindsItsOwn(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, defaults)

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.01)

    model = make_model()
    shows = [ProgressTableCallback(show_always=True), ProgressBarCallback(show_always=True), AdviceCallback()]
    records = [RunLogCallback(tmp_path), LearningRateMonitorCallback()]
    trainer = make_trainer([*shows, *records], model, optimizer=FindsItsOwn(model.parameters()))
    train(trainer, 2, eval_dataset=True)
    assert trainer.progress.update == 6
    assert not [name for name in trainer.run_history if name.startswith("lr")]
    assert json.loads((tmp_path / "run.json").read_text())["optimizer"] == "FindsItsOwn()"
