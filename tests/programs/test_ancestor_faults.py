"""One test for each measured fault of pytorch-accelerated, named after the correct behaviour."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import IterableDataset

from pytorch_accel_lite import NonFiniteLossError, Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import DEFAULT_CALLBACKS, SaveBestModelCallback, get_default_callbacks
from tests.launching import run_code
from tests.ranks import Recorder
from tests.shared_trainings import evaluate_inside, nan_on_one_rank, schedule
from tests.small_models import CountsReads, adamw_trainer, equal_weights, float64_data, float64_model, make_trainer


def test_an_attribute_error_inside_a_callback_is_raised():
    class Misspelt(TrainerCallback):
        def on_train_epoch_end(self, trainer, **kwargs):
            trainer.no_such_attribute  # noqa: B018

    with pytest.raises(AttributeError, match="no_such_attribute"):
        adamw_trainer(float64_model(), callbacks=[Misspelt]).train(float64_data(4), 1)


def test_on_train_step_end_fires_after_the_update():
    seen = []

    class Watch(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            seen.append(trainer.model[0].weight.detach().clone())

        def on_train_step_end(self, trainer, **kwargs):
            seen.append(trainer.model[0].weight.detach().clone())

    adamw_trainer(float64_model(), callbacks=[Watch]).train(float64_data(8), 1, per_device_batch_size=4)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])


def test_the_reported_loss_does_not_depend_on_accumulation():
    losses = []
    for accumulation in (1, 4):
        model = float64_model()
        trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        trainer.train(float64_data(32), 1, per_device_batch_size=4, gradient_accumulation_steps=accumulation)
        losses.append(trainer.run_history.get_latest_metric("train_loss_epoch"))
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_gradients_are_clipped_once_in_an_update():
    class Counts(Trainer):
        clips = 0

        def clip_gradients(self):
            self.clips += 1
            super().clip_gradients()

    trainer = make_trainer(model=float64_model(), trainer_class=Counts)
    data = float64_data(32)
    trainer.train(data, 1, per_device_batch_size=4, gradient_accumulation_steps=4, gradient_clip_value=1.0)
    assert trainer.clips == 2


def test_an_evaluation_in_mid_epoch_keeps_training_mode():
    result = evaluate_inside()
    assert result["training"]
    assert equal_weights(result[0][0], result[1][0])


def test_the_first_best_model_heeds_save_scheduler_false(tmp_path):
    path = tmp_path / "best.pt"
    best = SaveBestModelCallback(path, save_scheduler=False, save_optimizer=False)
    trainer = adamw_trainer(float64_model(), callbacks=[best])
    scheduler = partial(StepLR, step_size=1)
    trainer.train(float64_data(8), 1, float64_data(4), create_scheduler_fn=scheduler)
    saved = torch.load(path, weights_only=True)
    assert "model_state_dict" in saved
    assert not {"scheduler_state_dict", "optimizer_state_dict"} & saved.keys()


@pytest.mark.programs
def test_importing_and_training_do_not_seed_generators():
    script = """
import random, numpy, torch
torch.manual_seed(1); numpy.random.seed(1); random.seed(1)
expected = torch.rand(1).item(), numpy.random.rand(), random.random()
from tests.launching import forget
forget("pytorch_accel_lite", "tests")
torch.manual_seed(1); numpy.random.seed(1); random.seed(1)
import pytorch_accel_lite
from tests.small_models import adamw_trainer, float64_data, float64_model
model = float64_model()
trainer = adamw_trainer(model)
assert (torch.rand(1).item(), numpy.random.rand(), random.random()) == expected
first = numpy.random.get_state()[1].tolist()
trainer.train(float64_data(8), 1)
assert numpy.random.get_state()[1].tolist() == first
assert torch.initial_seed() == 1
"""
    run_code(script)


def test_placeholders_take_arithmetic_from_both_sides():
    updates = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    factory = partial(OneCycleLR, max_lr=0.1, total_steps=2 * updates + updates * 2 + 1)
    trainer = adamw_trainer(float64_model())
    trainer.train(float64_data(16), 2, per_device_batch_size=4, create_scheduler_fn=factory)
    assert trainer.scheduler.total_steps == 17


def test_on_training_run_end_is_called_on_errors():
    ends = []

    class Ends(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            raise RuntimeError("in a step")

        def on_exception(self, trainer, exception, **kwargs):
            ends.append(str(exception))

        def on_training_run_end(self, trainer, **kwargs):
            ends.append("end")

    with pytest.raises(RuntimeError, match="in a step"):
        adamw_trainer(float64_model(), callbacks=[Ends]).train(float64_data(4), 1)
    assert ends == ["in a step", "end"]


def test_a_nan_raises_an_error_rather_than_ending_the_program():
    model = float64_model()
    trainer = Trainer(model, lambda out, y: (out * float("nan")).mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NonFiniteLossError, match=r"epoch 1, step 0: loss=nan"):
        trainer.train(float64_data(4), 1)


def test_two_callbacks_of_one_class_are_allowed(tmp_path):
    first, second = (SaveBestModelCallback(tmp_path / f"{name}.pt") for name in "ab")
    trainer = adamw_trainer(float64_model(), callbacks=[first, second])
    trainer.train(float64_data(8), 1, float64_data(4))
    assert (tmp_path / "a.pt").exists()
    assert (tmp_path / "b.pt").exists()


def test_an_accelerator_is_passed_or_created_by_an_override():
    accelerator = Accelerator()
    assert adamw_trainer(float64_model(), accelerator=accelerator).accelerator is accelerator

    class Own(Trainer):
        def _create_accelerator(self):
            return accelerator

    model = float64_model()
    assert Own(model, nn.MSELoss(), None)._accelerator is accelerator


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("callbacks", [DEFAULT_CALLBACKS, get_default_callbacks(progress_bar=False)])
def test_the_default_callbacks_read_no_device_values_in_steps(callbacks):
    model = float64_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=callbacks)
    with CountsReads() as counted:
        trainer.train(float64_data(1000), 1, per_device_batch_size=1)
    assert trainer.progress.step == 1000
    assert counted.reads < 20


def test_a_short_last_window_has_its_full_gradient():
    x, y = float64_data(6).tensors
    model = float64_model()
    recorder = Recorder()
    trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[recorder])
    kwargs = {"shuffle": False}
    trainer.train(
        float64_data(6), 1, per_device_batch_size=2, gradient_accumulation_steps=2, train_dataloader_kwargs=kwargs
    )
    nn.functional.mse_loss(model(x[4:]), y[4:]).backward()
    assert torch.allclose(recorder.gradients[1]["0.weight"], model[0].weight.grad, atol=1e-12, rtol=0)


@pytest.mark.processes
def test_a_limit_of_updates_holds_on_2_processes(two_ranks):
    for result in two_ranks(schedule):
        assert all(run["updates"] == 7 for (_, limit), run in result.items() if limit == 7)


class Countdown(IterableDataset):
    def __iter__(self):
        return iter(float64_data(10))


@pytest.mark.extension("streams")
def test_dict_batches_and_iterable_datasets_train_alike():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = float64_model()

        def forward(self, features):
            return self.inner(features)

    x, y = float64_data(10).tensors
    rows = [{"features": a, "wanted": b} for a, b in zip(x, y, strict=True)]
    named, plain, streamed = Named(), float64_model(), float64_model()
    kwargs = {"per_device_batch_size": 4}
    adamw_trainer(named).train(rows, 2, train_dataloader_kwargs={"shuffle": False}, **kwargs)
    adamw_trainer(plain).train(float64_data(10), 2, train_dataloader_kwargs={"shuffle": False}, **kwargs)
    adamw_trainer(streamed).train(Countdown(), 2, **kwargs)
    assert equal_weights(named.inner.state_dict(), plain.state_dict())
    assert equal_weights(streamed.state_dict(), plain.state_dict())


@pytest.mark.processes
def test_a_nan_on_one_rank_stops_all_ranks(two_ranks):
    assert len(two_ranks(nan_on_one_rank)) == 2
    assert None not in two_ranks(nan_on_one_rank)
