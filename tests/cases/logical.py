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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import (
    GradientNormCallback,
    GradualUnfreezingCallback,
    LogOutputsCallback,
    MetricsCallback,
    ModelEmaCallback,
    SaveTrainingStateCallback,
    SkipFailedBatchesCallback,
    StepBasedEvaluationCallback,
)
from pytorch_accel_lite.callbacks.step_logging import StepLogger
from pytorch_accel_lite.data import Mixture
from pytorch_accel_lite.finetuning import ModelFreezer
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
    """Logs a number of its own in each step, and another one in every third step.

    :cvar is_weighted: whether the loss is a weighted mean over the samples
    """

    is_weighted = False

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        if self.is_weighted:
            losses = nn.functional.cross_entropy(output["model_outputs"], batch[1], reduction="none")
            items = 0.3 + batch[1]
            output |= {"loss": (losses * items).sum() / items.sum(), "num_items_in_batch": items.sum()}
        self.log("size", output["model_outputs"].abs().mean())
        if self.progress.step % 3 == 0:
            self.log("largest", output["model_outputs"].max())
        return output


class KeepRows(StepLogger):
    """Keeps its rows, which only the first process gets."""

    def __init__(self) -> None:
        super().__init__(every_n_updates=1)
        self.rows: list[Any] = []

    def write_row(self, update, epoch, values):
        self.rows.append((update, epoch, values))

    def state_dict(self):
        return super().state_dict() | {"rows": list(self.rows)}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.rows = list(state["rows"])


def images(
    logical: int | None = 8,
    size: int = 50,
    accumulation: int = 2,
    workers: int = 0,
    weighted: bool = False,
    extra: tuple[TrainerCallback, ...] = (),
    **kwargs: Any,
) -> dict[str, Any]:
    """Batch norm, dropout, augmentation, windows and batches that are not full, clipping, a schedule, an average."""
    model = convolution()
    ema = ModelEmaCallback(0.9, save_path=None)
    squares = MetricsCallback(
        MeanSquaredError(), lambda batch, output: (output["model_outputs"][:, 0], batch[1]), train=True
    )
    rows = KeepRows()
    trainer = Logs(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        [ema, squares, StepBasedEvaluationCallback(2), GradientNormCallback(), rows, *extra],
        seed=3,
        logical_processes=logical,
    )
    trainer.is_weighted = weighted
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
    kept = trainer.ranks.broadcast_object(lambda: rows.rows)
    return result_of(trainer, average=weights(ema.ema_model.module), predicted=trainer.predict(Noisy(21)), rows=kept)


def saved(folder: Path, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A run that keeps a state after each update and each epoch."""
    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, save_every_n_epochs=1)
    return images(extra=(saving, CopyStates(folder)), **(options or {}))


def resumed(state: Path, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is left of it. Until then, the random numbers are others."""
    torch.manual_seed(99)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The training state holds the state of callback 'SaveTrainingStateCallback'")
        return images(resume_from=state, **(options or {}))


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


class Picky(nn.Module):
    """Has memory for a few samples at a time in training."""

    def __init__(self, limit: int, inner: nn.Module) -> None:
        super().__init__()
        self.limit = limit
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) > self.limit:
            raise torch.OutOfMemoryError("out of memory.")
        return self.inner(x)


def microbatches() -> dict[str, Any]:
    """Batches that do not fit are split, everywhere from the same step on."""
    model = Picky(2, convolution())
    rows = KeepRows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Logs(model, nn.CrossEntropyLoss(), optimizer, [rows], seed=3, logical_processes=4)
    options = {"num_workers": 0}
    trainer.train(Noisy(50), 2, None, 6, train_dataloader_kwargs=options, auto_microbatch=True)
    kept = trainer.ranks.broadcast_object(lambda: rows.rows)
    return result_of(trainer, parts=trainer.num_microbatches, rows=kept)


class Methods(nn.Module):
    """Computes its own losses, with a frozen layer and a trained adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(5, 2, bias=False), nn.Dropout(0.3), nn.Linear(2, 8, bias=False))
        self.head = nn.Linear(8, 1)

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        outputs = self.head(torch.tanh(self.frozen(x) + self.adapter(x)))
        return {"loss": nn.functional.mse_loss(outputs, y), "model_outputs": outputs, "size": outputs.abs().mean()}


class Names(TrainerCallback):
    """Remembers which dataset each step is from."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def on_train_step_end(self, trainer, **kwargs):
        self.seen.append(trainer.train_dataset_name)


def mixture(**kwargs: Any) -> Mixture:
    datasets = {"small": regression_data(11, dtype=FLOATS), "large": regression_data(40, dtype=FLOATS)}
    return Mixture(datasets, {"small": 1.0, "large": 2.0}, **kwargs)


def combined() -> dict[str, Any]:
    """Methods of the model, an adapter, optimizers and schedules by name, batches of one dataset of a mixture."""
    model = Methods()
    optimizers = {
        "adapter": torch.optim.AdamW(model.adapter.parameters(), lr=0.01),
        "head": torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    }
    schedules = {"head": partial(OneCycleLR, max_lr=0.1, total_steps=P.MAX_NUM_TRAIN_STEPS)}
    names = Names()
    rows = KeepRows()
    callbacks = [names, LogOutputsCallback(), rows]
    methods = {"train": "losses", "eval": "losses"}
    trainer = Trainer(model, None, optimizers, callbacks, seed=2, logical_processes=5, model_methods=methods)
    trainer.train(
        mixture(mix_batches=False, batch_sizes={"small": 1}),
        2,
        regression_data(13, dtype=FLOATS),
        per_device_batch_size=2,
        gradient_accumulation_steps=2,
        create_scheduler_fn=schedules,
    )
    return result_of(trainer, names=names.seen, rows=trainer.ranks.broadcast_object(lambda: rows.rows))


def unfreezing() -> dict[str, Any]:
    """Layers that are frozen first, an optimizer that the trainer makes, batches of a mixture of all datasets."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 1)
    model = nn.Sequential(*layers)
    ModelFreezer(model).freeze()
    factory = partial(torch.optim.AdamW, lr=0.01)
    trainer = quiet_trainer(
        model, optimizer=factory, callbacks=[GradualUnfreezingCallback(1)], seed=2, logical_processes=4
    )
    trainer.train(mixture(), 3, per_device_batch_size=3)
    return result_of(trainer)


ALL: list[Callable[[], Any]] = [
    images,
    with_workers,
    few_samples,
    tokens,
    metrics,
    skipping,
    microbatches,
    combined,
    unfreezing,
]


def too_few() -> str:
    try:
        quiet_trainer(small_model(), seed=1, logical_processes=1)
    except ValueError as error:
        return str(error)
    return "accepted"


def with_shards() -> str:
    """What is said of a model that is sharded."""
    accelerator = Accelerator(cpu=True)
    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    trainer = quiet_trainer(model, seed=1, logical_processes=8, accelerator=accelerator)
    try:
        trainer.train(regression_data(16), 1, per_device_batch_size=1)
    except ValueError as error:
        return str(error)
    return "accepted"
