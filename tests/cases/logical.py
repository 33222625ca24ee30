"""Logical processes: the same bits on any number of real ones."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import (
    MetricsCallback,
    ModelEmaCallback,
    SaveTrainingStateCallback,
    SkipFailedBatchesCallback,
    StepBasedEvaluationCallback,
)
from tests.cases.common import world_size
from tests.scripts.resumable import CopyStates
from tests.tasks import quiet_trainer, regression_data, small_model, weights

P = TrainerPlaceholderValues
FLOATS = torch.float32


class Noisy(Dataset[Any]):
    """Images with augmentation by all generators."""

    def __init__(self, size: int) -> None:
        self.images = torch.randn(size, 2, 5, 5, generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(2, 5, 5) + 0.1 * np.random.randn() + 0.1 * random.random()
        return self.images[index] + noise.float(), index % 3


def convolution() -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(*layers)


def result_of(trainer: Trainer, **more: Any) -> dict[str, Any]:
    """What has to be the same, to the last bit."""
    return {
        "weights": weights(trainer.model),
        "optimizer": trainer.optimizer.state_dict(),
        "history": trainer.run_history.to_dict(),
        "progress": trainer.progress.state_dict(),
        "random": (torch.rand(2), np.random.rand(), random.random()),
        **more,
    }


class Logs(Trainer):
    """Logs a number of its own."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        self.log("size", output["model_outputs"].abs().mean())
        return output


def images(
    logical: int | None = 8,
    size: int = 50,
    accumulation: int = 2,
    workers: int = 0,
    extra: tuple[TrainerCallback, ...] = (),
    **kwargs: Any,
) -> dict[str, Any]:
    """Batch norm, dropout, augmentation, windows and batches that are not full, clipping, a schedule, an average."""
    model = convolution()
    ema = ModelEmaCallback(0.9, save_path=None)
    squares = MetricsCallback(
        MeanSquaredError(), lambda batch, output: (output["model_outputs"][:, 0], batch[1]), train=True
    )
    trainer = Logs(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        [ema, squares, StepBasedEvaluationCallback(2), *extra],
        seed=3,
        logical_processes=logical,
    )
    options = {"num_workers": workers}
    trainer.train(
        Noisy(size),
        2,
        Noisy(21),
        per_device_batch_size=3,
        gradient_accumulation_steps=accumulation,
        gradient_clip_norm=0.5,
        create_scheduler_fn=partial(OneCycleLR, max_lr=0.01, total_steps=P.MAX_NUM_TRAIN_STEPS),
        train_dataloader_kwargs=options,
        eval_dataloader_kwargs=options,
        **kwargs,
    )
    return result_of(trainer, average=weights(ema.ema_model.module), predicted=trainer.predict(Noisy(21)))


def saved(folder: Path) -> dict[str, Any]:
    """A run that keeps a state after each update and each epoch."""
    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, save_every_n_epochs=1)
    return images(extra=(saving, CopyStates(folder)))


def resumed(state: Path, logical: int | None = 8) -> dict[str, Any]:
    """What is left of it. Until then, the random numbers are others."""
    torch.manual_seed(99)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The training state holds the state of callback 'SaveTrainingStateCallback'")
        return images(logical, resume_from=state)


def with_workers() -> dict[str, Any]:
    return images(workers=1)


def few_samples() -> dict[str, Any]:
    """Fewer samples than logical processes, so that real ones have none in a step."""
    return images(size=3, accumulation=1) | {"5 of 8": images(size=5), "of 3": images(logical=3, size=16)}


class Tokens(Trainer):
    """A mean over some of the elements; a layer that not all shares use, and one that none does; own numbers."""

    def calculate_train_batch_loss(self, batch):
        x, y, mask = batch
        outputs = self.model["body"](x)
        if bool(mask[0, 0]):
            outputs = outputs + self.model["sometimes"](x)
        self.log("size", outputs.abs().mean())
        count = mask.sum() + (0.1 if self.fractions else 0)
        losses = {"first": ((outputs - y) ** 2 * mask).sum() / count.clamp(min=1), "second": outputs.square().mean()}
        return {"loss": losses, "model_outputs": outputs, "batch_size": len(x), "num_items_in_batch": count}


def tokens() -> dict[str, Any]:
    results = {}
    for fractions in (False, True):
        data = regression_data(70, dtype=FLOATS)
        mask = (torch.rand(70, 1, generator=torch.Generator().manual_seed(1)) < 0.6).float()
        torch.manual_seed(0)
        layers = {"body": small_model(dtype=FLOATS), "sometimes": nn.Linear(5, 1), "never": nn.Linear(1, 1)}
        model = nn.ModuleDict(layers)
        optimizers = {
            "body": torch.optim.AdamW(model["body"].parameters(), lr=0.01),
            "rest": torch.optim.SGD([*model["sometimes"].parameters(), *model["never"].parameters()], lr=0.1),
        }
        trainer = Tokens(model, None, optimizers, [], seed=1, logical_processes=5)
        trainer.fractions = fractions
        trainer.train(TensorDataset(*data.tensors, mask), 2, per_device_batch_size=2, gradient_accumulation_steps=3)
        results[fractions] = result_of(trainer)
    return results


class NoisyUpdates(TrainerCallback):
    """Uses random numbers between the steps, as Langevin dynamics do, and gathers what is in a step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_optimizer_step_end(self, trainer, **kwargs):
        with torch.no_grad():
            for parameter in trainer.get_model().parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape) + 0.01 * np.random.rand())

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        rows = batch[0][: batch_output["batch_size"]]
        self.seen.append(trainer.gather(rows))


def metrics() -> dict[str, Any]:
    """Metrics of training and evaluation that are sums of floats; half precision; noise between the steps."""
    model = small_model(dtype=FLOATS)
    noise = NoisyUpdates()
    scores = {"squares": MeanSquaredError(), "mean": MeanMetric()}
    callback = MetricsCallback(scores["squares"], train=True)
    only = MetricsCallback(scores["mean"], lambda batch, output: (output["model_outputs"],))
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    trainer = quiet_trainer(
        model, callbacks=[callback, only, noise], seed=4, logical_processes=7, accelerator=accelerator
    )
    data = regression_data(45, dtype=FLOATS)
    rates = trainer.find_lr(data, per_device_batch_size=2, num_steps=10)
    trainer.train(data, 2, data, per_device_batch_size=2)
    evaluated = trainer.evaluate(data, per_device_batch_size=3)
    found = result_of(
        trainer, rates=rates.losses, evaluated=evaluated, seen=noise.seen, predicted=trainer.predict(data, 4)
    )
    AcceleratorState._reset_state(reset_partial_state=world_size() == 1)
    return found


class Fragile(Logs):
    """Fails for two samples, after it has logged a value."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch[:2])
        if {17, 30} & set(batch[2].tolist()):
            raise ArithmeticError(f"samples {batch[2].tolist()} are bad")
        return output


class Torn(Noisy):
    """A sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError(f"sample {index} cannot be read")
        return *super().__getitem__(index), index


def skipping() -> dict[str, Any]:
    model = convolution()
    skips = SkipFailedBatchesCallback()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Fragile(model, nn.CrossEntropyLoss(), optimizer, [skips], seed=3, logical_processes=6)
    options = {"num_workers": 0}
    trainer.train(Torn(60), 2, None, 2, gradient_accumulation_steps=2, train_dataloader_kwargs=options)
    return result_of(trainer, failures=skips.failures)


ALL: list[Callable[[], Any]] = [images, with_workers, few_samples, tokens, metrics, skipping]


def too_few() -> str:
    try:
        quiet_trainer(small_model(), seed=1, logical_processes=1)
    except ValueError as error:
        return str(error)
    return "accepted"
