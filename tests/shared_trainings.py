"""Trainings that several test files share, most of them on several processes."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from pytorch_accel_lite import NonFiniteLossError, StopTrainingError, Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import TerminateOnNaNCallback
from tests.ranks import IN_ORDER, Recorder, global_batch, rank, world_size
from tests.small_models import adamw_trainer, float64_data, float64_model, listener, make_trainer, train, weights

#: Arguments of ``train`` that belong to an extension.
SPLITTING = pytest.param({"auto_microbatch": True}, marks=pytest.mark.extension("failed_batches"))


class Contrastive(Trainer):
    """A contrastive loss: each output should be nearer to its own target than to those of other samples of the step."""

    def calculate_train_batch_loss(self, batch):
        x, y = batch
        z, y = self.gather((self.model(x), y), with_gradients=True)
        return {"loss": self.loss_func(z, y), "batch_size": len(x)}


def to_own_target(z: torch.Tensor, y: torch.Tensor, rows: Any = slice(None)) -> torch.Tensor:
    return nn.functional.cross_entropy(-((z[rows] - y.T) ** 2), torch.arange(len(z))[rows])


def both_ways(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (to_own_target(z, y) + to_own_target(y, z)) / 2


def uneven_batches() -> Any:
    """Weights, gradients and losses with an incomplete last batch, accumulation 1 to 3 and global batches of 6."""
    results = {}
    for accumulation in (1, 2, 3):
        for size in (37, 30, 4):
            model = float64_model()
            recorder = Recorder()
            trainer = adamw_trainer(model, callbacks=[recorder])
            trainer.train(
                float64_data(size),
                3,
                float64_data(11),
                per_device_batch_size=global_batch(6),
                gradient_accumulation_steps=accumulation,
                train_dataloader_kwargs=IN_ORDER,
                gradient_clip_norm=1.0,
            )
            results[accumulation, size] = {
                "weights": weights(model),
                "gradients": recorder.gradients,
                "history": trainer.run_history.to_dict(),
                "updates": trainer.progress.update,
                "samples": trainer.progress.samples,
            }
    return results


class TokenTrainer(Trainer):
    """A loss that is a mean over unmasked elements, as for tokens."""

    def calculate_train_batch_loss(self, batch):
        x, y, mask = batch
        outputs = self.model(x)
        loss = ((outputs - y) ** 2)[mask].mean()
        return {"loss": loss, "model_outputs": outputs, "batch_size": len(x), "num_items_in_batch": mask.sum()}


def tokens() -> Any:
    results = {}
    for accumulation in (1, 3):
        data = float64_data(40)
        mask = torch.rand(40, 1, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[::2] = True
        model, recorder = float64_model(), Recorder()
        trainer = TokenTrainer(model, None, torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[recorder])
        trainer.train(
            TensorDataset(*data.tensors, mask),
            2,
            per_device_batch_size=global_batch(6),
            gradient_accumulation_steps=accumulation,
            train_dataloader_kwargs=IN_ORDER,
        )
        results[accumulation] = {
            "weights": weights(model),
            "gradients": recorder.gradients,
            "history": trainer.run_history.to_dict(),
        }
    return results


def note_rate(rates: list[float], trainer: Trainer) -> None:
    rates.append(trainer.optimizer.param_groups[0]["lr"])


def schedule() -> Any:
    """Updates and learning rates of runs limited to seven updates, and of whole epochs."""
    results = {}
    placeholders = TrainerPlaceholderValues
    for accumulation in (1, 2, 3):
        for limit in (7, None):
            model = float64_model()
            trainer = adamw_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            rates: list[float] = []
            trainer.callback_handler.add_callback(listener(on_optimizer_step_start=partial(note_rate, rates)))
            total = placeholders.MAX_NUM_TRAIN_STEPS
            if limit is None:
                total = placeholders.NUM_EPOCHS * placeholders.NUM_UPDATE_STEPS_PER_EPOCH
            trainer.train(
                float64_data(37),
                2,
                per_device_batch_size=global_batch(6),
                max_num_train_steps=limit,
                gradient_accumulation_steps=accumulation,
                create_scheduler_fn=partial(OneCycleLR, max_lr=0.1, total_steps=total),
            )
            results[accumulation, limit] = {
                "updates": trainer.progress.update,
                "rates": rates,
                "lowest": trainer.scheduler.optimizer.param_groups[0]["min_lr"],
                "scheduler_steps": trainer.scheduler.last_epoch,
            }
    return results


class NaNOnOneRank(Trainer):
    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        if self.progress.step == 3 and rank() == world_size() - 1:
            output["loss"] = output["loss"] * float("nan")
        return output


def nan_on_one_rank() -> Any:
    events = []

    class Events(TrainerCallback):
        def on_exception(self, trainer, exception, **kwargs):
            events.append(("on_exception", type(exception).__name__))

        def on_training_run_end(self, trainer, **kwargs):
            events.append(("on_training_run_end",))

    model = float64_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = NaNOnOneRank(model, nn.MSELoss(), optimizer, callbacks=[TerminateOnNaNCallback, Events])
    try:
        trainer.train(float64_data(60), 2, per_device_batch_size=2)
    except NonFiniteLossError as error:
        return {"message": str(error), "events": events, "update": trainer.progress.update}
    return None


class StopsAt(TrainerCallback):
    """Stops the run at an event, after a number of updates if given, on the last rank only."""

    def __init__(self, event: str, update: int | None = None) -> None:
        self.update = update
        setattr(self, event, self.stop)

    def stop(self, trainer, **kwargs):
        if self.update in (None, trainer.progress.update) and rank() == world_size() - 1:
            raise StopTrainingError("enough")


class EvaluateInside(TrainerCallback):
    """Evaluates other data in the middle of an epoch."""

    def on_train_step_end(self, trainer, step, **kwargs):
        if step == 1:
            self.metrics = trainer.evaluate(float64_data(5), per_device_batch_size=2)
            self.training = trainer.model.training


def evaluate_inside() -> Any:
    results = {}
    for callbacks in ([], [EvaluateInside()]):
        model = float64_model()
        trainer = adamw_trainer(model, callbacks=callbacks)
        trainer.train(
            float64_data(20),
            2,
            float64_data(6),
            per_device_batch_size=global_batch(6),
            train_dataloader_kwargs=IN_ORDER,
        )
        losses = trainer.run_history.to_dict()
        results[len(callbacks)] = weights(model), {k: v for k, v in losses.items() if k != "evaluation_loss"}
        if callbacks:
            results["metrics"], results["training"] = callbacks[0].metrics, callbacks[0].training
    return results


class Scripted(Trainer):
    """Records what ``script`` says as ``score`` at the end of each evaluation."""

    script: ClassVar[list[float]] = []

    def eval_epoch_end(self):
        self.run_history.update_metric("score", self.script[self.run_history.current_epoch - 1])


def scripted(script: list[float], *callbacks: Any, epochs: int | None = None, **kwargs: Any) -> Any:
    """Train for as many epochs as there are scores, and return the trainer with the weights after each epoch."""
    kept = []
    trainer_class = type("Scripted", (Scripted,), {"script": script})
    keep = listener(on_training_run_epoch_end=lambda t: kept.append(weights(t.model)))
    trainer = make_trainer([keep, *callbacks], trainer_class=trainer_class)
    train(trainer, epochs=epochs or len(script), eval_dataset=True, **kwargs)
    trainer.weights_after_epoch = kept
    return trainer
