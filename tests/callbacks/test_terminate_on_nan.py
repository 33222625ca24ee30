"""Losses that are not finite end a run, and the error says where."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from pytorch_accel_lite import LossTracker, NonFiniteLossError, Trainer
from pytorch_accel_lite.callbacks import StepBasedEvaluationCallback, TerminateOnNaNCallback
from tests.small_models import listener, make_data, make_model, make_trainer, train


def poisoned(value: float, sample: int = 7, size: int = 8) -> TensorDataset:
    """Data of which one target is not finite."""
    data = make_data(size)
    data.tensors[1][sample] = value
    return data


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_an_error_with_its_position(value):
    fired: list[str] = []
    callback = TerminateOnNaNCallback()
    watch = listener(
        on_exception=lambda t, exception: fired.append(f"on_exception {type(exception).__name__}"),
        on_training_run_end=lambda t: fired.append("on_training_run_end"),
        on_train_step_end=lambda t, step, **_: fired.append(f"step {step}"),
        on_eval_epoch_start=lambda t, **_: fired.append("evaluation"),
    )
    trainer = make_trainer([callback, watch])
    with pytest.raises(NonFiniteLossError) as caught:
        train(trainer, epochs=3, train_dataset=poisoned(value, sample=5), eval_dataset=make_data())
    assert isinstance(caught.value, FloatingPointError)
    assert not isinstance(caught.value, SystemExit)
    message = str(caught.value)
    assert "epoch 1" in message
    assert "step 2" in message
    assert "loss=nan" in message if math.isnan(value) else "loss=inf" in message
    assert fired == ["step 0", "step 1", "step 2", "on_exception NonFiniteLossError", "on_training_run_end"]
    assert callback.triggered


@pytest.mark.filterwarnings("error")
def test_the_error_of_a_loss_that_is_not_finite_names_the_losses():
    class TwoLosses(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return output | {"loss": {"fit": output["loss"], "penalty": output["loss"] * math.inf}}

    with pytest.raises(NonFiniteLossError, match=r"fit=\d.*penalty=inf"):
        train(make_trainer([TerminateOnNaNCallback], trainer_class=TwoLosses))


class Labelled(Trainer):
    """Its loss is a mean over the positive targets, and NaN in a batch without any."""

    as_count: Any = int

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        counts = batch[1] > 0
        loss = output["model_outputs"][counts].square().mean()
        losses = {"fit": loss, "other": loss * 0}
        return output | {"loss": losses, "num_items_in_batch": self.as_count(counts.sum().item())}


@pytest.mark.parametrize("as_count", [int, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_of_which_nothing_counts_ends_no_run(as_count, accumulation):
    data = make_data()
    data.tensors[1].abs_().add_(1)
    data.tensors[1][:2] = -1
    seen: list[float] = []

    def note(trainer, batch_output, **_):
        if batch_output["num_items_in_batch"]:
            seen.append(batch_output["loss"].item())

    trainer = make_trainer([TerminateOnNaNCallback, listener(on_train_step_end=note)], trainer_class=Labelled)
    trainer.as_count = as_count
    kwargs = {"gradient_accumulation_steps": accumulation, "train_dataloader_kwargs": {"shuffle": False}}
    train(trainer, epochs=1, train_dataset=data, **kwargs)
    assert len(seen) > 1
    assert trainer.run_history.get_latest_metric("train_loss_epoch") == pytest.approx(sum(seen) / len(seen))
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("empty", [0, 1, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_mean_over_no_items_that_spoils_the_weights_is_named(empty, accumulation):
    class Masked(Trainer):
        def calculate_train_batch_loss(self, batch):
            x, mask = batch
            loss = (self.model(x) ** 2 * mask).sum() / mask.sum()
            return {"loss": loss, "num_items_in_batch": mask.sum()}

    mask = torch.ones(6, 1)
    mask[2 * empty : 2 * empty + 2] = 0
    trainer = make_trainer([TerminateOnNaNCallback], trainer_class=Masked)
    data = TensorDataset(make_data(6).tensors[0], mask)
    with pytest.raises(NonFiniteLossError, match=rf"epoch 1, step {empty} is a mean over no items.*max\(items, 1\)"):
        train(trainer, train_dataset=data, gradient_accumulation_steps=accumulation)
    assert trainer.progress.step == empty + 1


def test_batches_of_which_nothing_counts_are_not_kept():
    data = make_data(40)
    data.tensors[1][2:] = -1
    data.tensors[1][:2] = 1
    tensors: list[int] = []

    def count(trainer, **_):
        tensors.append(sum(type(value) is torch.Tensor for value in gc.get_objects()))

    trainer = make_trainer([TerminateOnNaNCallback, listener(on_train_step_end=count)], trainer_class=Labelled)
    train(trainer, epochs=1, train_dataset=data)
    assert len(tensors) == 20
    assert tensors[-1] <= tensors[5] + 2


@pytest.mark.parametrize("total", [0.0, torch.zeros((), dtype=torch.float64)], ids=["host", "device"])
@pytest.mark.parametrize("as_count", [int, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("as_loss", [float, torch.tensor], ids=["number", "tensor"])
def test_a_running_mean_leaves_out_means_over_nothing(total, as_count, as_loss):
    tracker = LossTracker()
    tracker.load_state_dict({"total_loss": total, "running_count": 0, "loss_value": 0.0})
    for loss, count in ((math.nan, 0), (2.0, 3), (math.inf, 0), (1.0, 1)):
        tracker.update(as_loss(loss), as_count(count))
    assert tracker.average == 1.75
    tracker.update(as_loss(math.nan), as_count(1))
    assert math.isnan(tracker.average)


def test_the_error_names_the_epoch_in_which_the_loss_became_nan():
    class LaterNaN(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            late = self.progress.epoch == 2 and self.progress.step == 1
            return output | {"loss": output["loss"] * (math.nan if late else 1)}

    with pytest.raises(NonFiniteLossError, match=r"epoch 2, step 1"):
        train(make_trainer([TerminateOnNaNCallback], trainer_class=LaterNaN), epochs=3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nan_is_seen_in_every_precision(dtype):
    model = make_model().to(dtype)
    data = TensorDataset(*(tensor.to(dtype) for tensor in poisoned(math.nan, 0).tensors))
    with pytest.raises(NonFiniteLossError):
        train(make_trainer([TerminateOnNaNCallback], model=model), train_dataset=data)


def test_a_nan_in_the_evaluation_of_a_run_ends_it_too():
    with pytest.raises(NonFiniteLossError, match=r"evaluation loss.*eval_loss_epoch=nan"):
        train(make_trainer([TerminateOnNaNCallback]), eval_dataset=poisoned(math.nan))


class LogsNaN(Trainer):
    """Returns losses by name, and logs a number that is not finite."""

    def calculate_train_batch_loss(self, batch):
        loss = super().calculate_train_batch_loss(batch)["loss"]
        self.log("auc", math.nan)
        return {"loss": {"fit": loss, "penalty": 0.1 * loss}}

    def calculate_eval_batch_loss(self, batch):
        loss = super().calculate_eval_batch_loss(batch)["loss"]
        self.log("auc", math.nan)
        return {"loss": {"fit": loss, "penalty": 0.1 * loss}}


def test_a_custom_number_may_be_nan():
    callbacks = [TerminateOnNaNCallback, StepBasedEvaluationCallback(2)]
    trainer = train(make_trainer(callbacks, trainer_class=LogsNaN), epochs=2, eval_dataset=True)
    for name in ("train_auc_epoch", "eval_auc_epoch", "intermediate_eval_auc"):
        assert all(map(math.isnan, trainer.run_history[name]))
    match = r"evaluation loss.*: eval_loss_epoch=nan, eval_fit_epoch=nan, eval_penalty_epoch=nan\."
    with pytest.raises(NonFiniteLossError, match=match):
        train(make_trainer(callbacks[:1], trainer_class=LogsNaN), eval_dataset=poisoned(math.nan))


def test_evaluate_returns_a_nan_loss():
    assert math.isnan(make_trainer([TerminateOnNaNCallback]).evaluate(poisoned(math.nan))["evaluation_loss"])


def test_without_the_callback_a_nan_ends_nothing():
    with pytest.warns(UserWarning, match="with weights that are infinite or NaN"):
        trainer = train(make_trainer(), epochs=2, train_dataset=poisoned(math.nan))
    assert trainer.progress.epochs_completed == 2


def test_after_a_nan_the_next_run_starts_fresh():
    callback = TerminateOnNaNCallback()
    trainer = make_trainer([callback])
    with pytest.raises(NonFiniteLossError):
        train(trainer, train_dataset=poisoned(math.nan))
    trainer.model.load_state_dict(make_model().state_dict())
    train(trainer)
    assert not callback.triggered
