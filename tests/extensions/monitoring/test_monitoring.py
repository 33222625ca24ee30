"""Monitoring callbacks: values equal those computed by hand, and steps read no device values."""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.callbacks import (
    DeviceMemoryCallback,
    GradientNormCallback,
    LearningRateMonitorCallback,
    LossScaleCallback,
    SaveTrainingStateCallback,
)
from pytorch_accel_lite.run.run import Step
from tests.small_models import Overflows, listener, make_model, make_trainer, train


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_recorded_learning_rates_are_those_of_the_updates(rate):
    """A schedule sets the next rate in the tensor of the one before."""
    seen: list[Any] = []
    look = listener(on_optimizer_step_end=lambda t: seen.append(t.step_metrics["lr"]))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    trainer = make_trainer([LearningRateMonitorCallback, look], model, optimizer=optimizer)
    halve = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    train(trainer, epochs=2, create_scheduler_fn=halve)
    assert [*map(float, seen)] == [0.5 ** (i + 1) for i in range(6)]
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


@pytest.mark.extension("manual_optimization")
def test_a_step_replaced_on_an_object_has_a_norm_per_optimizer():
    def train_step(trainer: Trainer, batch: Any) -> None:
        for name in "ab":
            trainer.update(trainer.calculate_train_batch_loss(batch)["loss"], optimizer=name)

    model = make_model()
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in zip("ab", model[::2], strict=True)}
    trainer = make_trainer([GradientNormCallback], model=model, optimizer=optimizers)
    trainer.train_step = MethodType(train_step, trainer)
    train(trainer)
    norms = {f"gradient_norm_{name}_{kind}" for name in "ab" for kind in ("mean", "max")}
    assert norms <= trainer.run.request.metrics.directions.keys() | set(trainer.run_history.get_metric_names())
    assert "gradient_norm_mean" not in trainer.run_history.get_metric_names()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("value", [None, 0.1])
def test_gradient_norms_are_those_before_clipping(clip, value):
    norms: list[float] = []

    class Norms(Trainer):
        def clip_gradients(self):
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.model.parameters()])))
            super().clip_gradients()

    trainer = make_trainer([GradientNormCallback], trainer_class=Norms)
    train(trainer, gradient_clip_norm=clip, gradient_clip_value=value, eval_dataset=True)
    values = {name: trainer.run_history.get_metric_values(name) for name in trainer.run_history.get_metric_names()}
    assert values["gradient_norm_mean"] == [pytest.approx(sum(norms) / 3)]
    assert values["gradient_norm_max"] == [pytest.approx(max(norms))]
    assert float(trainer.step_metrics["gradient_norm"]) == pytest.approx(norms[-1])
    if clip is None:
        assert "clipped_updates" not in values
    else:
        assert values["clipped_updates"] == [sum(norm > clip for norm in norms) / 3]
        assert values["clipped_updates"][0] > 0


def test_a_resumed_epoch_has_the_norms_of_all_its_updates(tmp_path):
    def run(**kwargs: Any) -> dict[str, Any]:
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        trainer = make_trainer([GradientNormCallback, saving], seed=0)
        train(trainer, epochs=1, gradient_clip_norm=0.5, **kwargs)
        return trainer.run_history.to_dict()

    whole = run()
    assert run(resume_from=tmp_path / "update-000000002") == whole


def test_memory_is_recorded_in_mebibytes():
    trainer = train(make_trainer([DeviceMemoryCallback]), epochs=2)
    used = trainer.run_history.get_metric_values("memory_resident_mib")
    assert len(used) == 2
    assert 50 < used[0] <= used[1] < 100_000


@pytest.mark.parametrize("older", [False, True])
def test_skipped_updates_are_counted_over_a_resume(older, tmp_path, monkeypatch, scaled_accelerator):
    """Also from a state of 0.2, which has no count of the run."""
    if older:
        monkeypatch.setattr(Step, "state_dict", lambda self: {})
        monkeypatch.setattr(LossScaleCallback, "state_dict", lambda self: {"skipped": 2})

    def save(trainer: Any, **kwargs: Any) -> None:
        if trainer.progress.update == 6:
            trainer.save_training_state(tmp_path / "state")

    def run(**kwargs: Any) -> list[int]:
        skip = listener(on_optimizer_step_start=lambda t: t.skip_update() if t.progress.update not in (2, 6) else None)
        callbacks = [skip, LossScaleCallback, listener(on_train_step_checkpoint=save)]
        trainer = make_trainer(callbacks, seed=1, accelerator=scaled_accelerator)
        train(trainer, epochs=2, size=8, **kwargs)
        assert older or trainer.run.training_step.skipped_updates == 6
        return trainer.run_history.get_metric_values("skipped_updates")

    assert run() == run(resume_from=tmp_path / "state") == [3, 3]


def test_the_loss_scale_and_its_skipped_updates_are_recorded(scaled_accelerator):
    scales: list[float] = []
    see = listener(on_update_end=lambda t, **_: scales.append(t.step_metrics["loss_scale"]))
    trainer = make_trainer([LossScaleCallback, see], trainer_class=Overflows, accelerator=scaled_accelerator)
    train(trainer, epochs=2)
    assert trainer.run_history.get_metric_values("loss_scale") == [2.0**9, 2.0**8]  # halved by each infinity
    assert trainer.run_history.get_metric_values("skipped_updates") == [1, 1]
    assert (scales[0], scales[-1]) == (2.0**10, 2.0**8)


def test_norms_that_overflow_under_a_scaler_are_left_out(scaled_accelerator):
    norms: list[float] = []
    see = listener(on_update_end=lambda t, **_: norms.append(float(t.step_metrics["gradient_norm"])))
    trainer = make_trainer([GradientNormCallback, see], trainer_class=Overflows, accelerator=scaled_accelerator)
    train(trainer, gradient_clip_norm=1e-3)
    values = trainer.run_history.get_metric_values
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]
    assert values("gradient_norm_mean") == [pytest.approx((norms[0] + norms[2]) / 2)]
    assert values("gradient_norm_max") == [pytest.approx(max(norms[0], norms[2]))]
    assert values("clipped_updates") == [1.0]


def test_without_a_scaler_there_is_no_loss_scale():
    trainer = train(make_trainer([LossScaleCallback]))
    assert list(trainer.run_history.get_metric_names()) == ["train_loss_epoch"]
    assert "loss_scale" not in trainer.step_metrics


def test_an_epoch_without_observed_updates_has_no_norms(tmp_path):
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


@pytest.mark.extension("advice", "progress_table")
@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_optimizers_without_a_rate_train_with_rate_displays(defaults):
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    class FindsItsOwn(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, defaults)

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.01)

    model = make_model()
    shows = [callbacks.ProgressTableCallback(show_always=True), ProgressBarCallback(show_always=True)]
    others = [callbacks.AdviceCallback(), LearningRateMonitorCallback()]
    trainer = make_trainer([*shows, *others], model, optimizer=FindsItsOwn(model.parameters()))
    train(trainer, 2, eval_dataset=True)
    assert trainer.progress.update == 6
    assert not [name for name in trainer.run_history if name.startswith("lr")]
