"""Updates whose gradients are unusually large are skipped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import GradientSpikeCallback, SaveTrainingStateCallback
from tests.ranks import IN_ORDER
from tests.small_models import equal_weights, float64_data, listener, make_trainer, train, weights


def fit(
    callbacks: Any, data: Any, epochs: int = 1, seed: int | None = None, trainer_class: Any = Trainer, **kwargs: Any
) -> Trainer:
    """Train a small model in batches of five samples, in order."""
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = trainer_class(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=seed)
    trainer.train(
        data, epochs, per_device_batch_size=5, train_dataloader_kwargs=IN_ORDER | {"num_workers": 0}, **kwargs
    )
    return trainer


def spiky(at: int = 20, size: int = 50, value: float = 1e3) -> Any:
    """Data of which the fifth batch has enormous targets."""
    data = float64_data(size)
    data.tensors[1][at : at + 5] = value
    return data


@pytest.mark.parametrize("value", [1e3, math.nan])
@pytest.mark.parametrize("clip", [None, 1e9])
def test_an_update_with_a_spike_is_skipped(value, clip, capsys):
    kept: list[Any] = []
    keep = listener(on_train_step_end=lambda t, **_: kept.append(weights(t.model)))
    guard = GradientSpikeCallback(warm_up_updates=3)
    trainer = fit([guard, keep], spiky(value=value), gradient_clip_norm=clip)
    assert guard.skipped == [5]
    assert equal_weights(kept[4], kept[3])
    assert not equal_weights(kept[5], kept[4])
    assert trainer.progress.update == 10
    assert "Update 5 skipped: the gradient norm is" in capsys.readouterr().out


class ClippedByTorch(Trainer):
    def clip_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


@pytest.mark.parametrize(("trainer_class", "value"), [(Trainer, 0.1), (ClippedByTorch, None)])
def test_a_spike_is_seen_before_the_gradients_are_clipped(trainer_class, value):
    guard = GradientSpikeCallback(warm_up_updates=3)
    fit([guard], spiky(), trainer_class=trainer_class, gradient_clip_value=value)
    assert guard.skipped == [5]


def test_the_schedule_waits_for_an_update_that_is_skipped():
    guard = GradientSpikeCallback(warm_up_updates=3)
    create = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    trainer = fit([guard], spiky(), create_scheduler_fn=create)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**9


def test_gradients_after_a_warm_up_with_none_are_no_spikes():
    class SilentAtFirst(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return output | {"loss": output["loss"] * (self.progress.update >= 4)}

    guard = GradientSpikeCallback(warm_up_updates=2)
    trainer = train(make_trainer([guard], trainer_class=SilentAtFirst), size=16)
    assert guard.skipped == []
    assert trainer.progress.update == 8


def test_consecutive_spikes_end_the_run():
    data = float64_data(50)
    data.tensors[1][15:] = 1e3
    guard = GradientSpikeCallback(warm_up_updates=3, max_skips_in_a_row=4)
    trainer = fit([guard], data, epochs=2)
    assert "gradients of 4 updates in a row" in trainer.stop_reason
    assert guard.skipped == [4, 5, 6, 7]


class TwoNetworks(Trainer):
    """Updates two networks in each step; after four steps, the gradients of the named ones are not finite."""

    def __init__(self, diverging: tuple[str, ...], guard: GradientSpikeCallback) -> None:
        self.diverging = diverging
        self.parts = nn.ModuleDict({name: nn.Linear(5, 1).double() for name in ("first", "second")})
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.01) for name, part in self.parts.items()}
        super().__init__(self.parts, None, optimizers, callbacks=[guard])

    def train_step(self, batch: Any) -> None:
        for name, part in self.parts.items():
            has_diverged = name in self.diverging and self.progress.step > 3
            loss = nn.functional.mse_loss(part(batch[0]), batch[1])
            self.update(loss * (math.nan if has_diverged else 1.0), name)


@pytest.mark.extension("manual_optimization")
@pytest.mark.parametrize("diverging", [("second",), ("first", "second")])
def test_the_spikes_of_each_optimizer_are_counted(diverging):
    trainer = TwoNetworks(diverging, GradientSpikeCallback(max_skips_in_a_row=4))
    trainer.train(float64_data(50), 1, per_device_batch_size=5)
    assert f"gradients of 4 updates of {diverging[-1]!r} in a row" in trainer.stop_reason
    assert trainer.progress.step == 8


def test_a_state_with_one_count_of_spikes_is_loaded():
    guard = GradientSpikeCallback()
    guard.load_state_dict({"count": {"a": 3, "b": 2}, "average": {"a": 1.0, "b": 1.0}, "in_a_row": 2, "skipped": [4]})
    assert guard.state_dict()["in_a_row"] == {"": 2, "a": 2, "b": 2}


def test_a_run_that_ends_after_spikes_saves_its_last_state(tmp_path, capsys):
    data = float64_data(50)
    data.tensors[1][15:] = 1e3

    def run(most: int, **kwargs: Any) -> Trainer:
        guard = GradientSpikeCallback(warm_up_updates=3, max_skips_in_a_row=most)
        return fit([guard, SaveTrainingStateCallback(tmp_path)], data, epochs=2, seed=2, **kwargs)

    stopped = run(4)
    assert stopped.progress.update == 7
    assert "No training state was saved" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("update-*")] == ["update-000000007"]
    assert run(4, resume_from="latest").progress.update == 7
    assert run(6, resume_from="latest").progress.update == 9


def test_the_spike_guard_resumes_its_statistics(tmp_path):
    def run(**kwargs: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        guard = GradientSpikeCallback(3, warm_up_updates=3)
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        trainer = fit([guard, saving], spiky(), seed=2, **kwargs)
        return weights(trainer.model), guard.state_dict()

    whole, state = run()
    resumed, again = run(resume_from=tmp_path / "update-000000003")
    assert equal_weights(resumed, whole)
    assert again == state


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"factor": 1}, ValueError, "factor=1 must be greater than 1"),
        ({"decay": 1.0}, ValueError, "decay=1.0 must be greater than 0 and less than 1"),
        ({"decay": "0.9"}, TypeError, "decay='0.9' must be a number"),
        ({"warm_up_updates": -1}, ValueError, "warm_up_updates=-1 must be at least 0"),
        ({"max_skips_in_a_row": 0}, ValueError, "max_skips_in_a_row=0 must be at least 1"),
    ],
)
def test_gradient_spikes_refuse_bad_factors_and_counts(arguments, error, message):
    with pytest.raises(error, match=message):
        GradientSpikeCallback(**arguments)


def test_overflows_of_a_scaler_are_no_spikes(scaled_accelerator):
    class Halves(Trainer):
        def backward_step(self, loss):
            super().backward_step(loss if scaled_accelerator.scaler.get_scale() < 2.0**6 else loss * math.inf)

    guard = GradientSpikeCallback(max_skips_in_a_row=2)
    train(make_trainer([guard], trainer_class=Halves, accelerator=scaled_accelerator), epochs=3, size=9)
    assert scaled_accelerator.scaler.get_scale() == 2.0**5
    assert guard.skipped == []
