"""The same training in a plain loop and with each trainer, set up as its documentation recommends for a CPU.

A contender is a function of a task and a directory to write to. It imports what it needs, and returns the function that
trains, which is what is measured. The table shows packages that are not installed as such.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.tasks import Task

Train = Callable[[], None]
Make = Callable[[Task, Path], Train]
CONTENDERS: dict[str, Make] = {}
# Contenders that take part in one workload only.
ONLY_IN = {"plain loop, indexing tensors": "tensors"}


def contender(name: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        CONTENDERS[name] = make
        return make

    return register


def loader_of(task: Task) -> Iterable[Any]:
    """Return prepared batches as a list, or the usual loader."""
    return task.batches() if task.ready else DataLoader(task.dataset, task.batch_size, shuffle=True)


def first(batch: Any) -> Any:
    return batch


def only(batches: list[Any]) -> Any:
    return batches[0]


def torch_loader_of(task: Task) -> DataLoader[Any]:
    """Return the same for trainers that require a DataLoader."""
    if task.ready:
        return DataLoader(task.batches(), batch_size=None, collate_fn=first)  # type: ignore[arg-type]
    return DataLoader(task.dataset, task.batch_size, shuffle=True)


@contender("plain loop")
def by_hand(task: Task, folder: Path) -> Train:
    model, loss_func = task.make_model(), task.loss_func
    optimizer, loader = task.make_optimizer(model), loader_of(task)

    def train() -> None:
        model.train()
        for inputs, targets in loader:
            loss_func(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


CONTENDERS["plain loop again (control)"] = by_hand


@contender("plain loop, indexing tensors")
def by_hand_indexing(task: Task, folder: Path) -> Train:
    """Train with the minimum cost of shuffled data in memory: one indexing operation per tensor and batch."""
    model, loss_func = task.make_model(), task.loss_func
    optimizer, tensors = task.make_optimizer(model), task.dataset.tensors  # type: ignore[attr-defined]

    def train() -> None:
        model.train()
        for chosen in torch.randperm(len(tensors[0])).split(task.batch_size):
            inputs, targets = (tensor.index_select(0, chosen) for tensor in tensors)
            loss_func(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


@contender("plain Accelerate loop")
def accelerate_by_hand(task: Task, folder: Path) -> Train:
    from accelerate import Accelerator

    accelerator, loss_func = Accelerator(cpu=True), task.loss_func
    model = task.make_model()
    model, optimizer, loader = accelerator.prepare(model, task.make_optimizer(model), torch_loader_of(task))

    def train() -> None:
        for inputs, targets in loader:
            accelerator.backward(loss_func(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    return train


def ours(task: Task, callbacks: Any, **kwargs: Any) -> Train:
    from pytorch_accel_lite import Trainer

    class ReadyTrainer(Trainer):
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return batches if task.ready else super().create_train_dataloader(batch_size, train_dl_kwargs)

    batches = task.batches() if task.ready else None
    model = task.make_model()
    trainer = ReadyTrainer(model, task.loss_func, task.make_optimizer(model), callbacks)
    workers = None if task.ready else {"num_workers": 0}
    return lambda: trainer.train(
        task.dataset, 1, per_device_batch_size=task.batch_size, train_dataloader_kwargs=workers, **kwargs
    )


@contender("ours, no callbacks")
def ours_bare(task: Task, folder: Path) -> Train:
    return ours(task, ())


@contender("ours, default without bar")
def ours_default(task: Task, folder: Path) -> Train:
    from pytorch_accel_lite import get_default_callbacks

    return ours(task, get_default_callbacks(progress_bar=False))


@contender("ours, default with bar")
def ours_bar(task: Task, folder: Path) -> Train:
    from pytorch_accel_lite import get_default_callbacks
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    return ours(task, [*get_default_callbacks(progress_bar=False), ProgressBarCallback(show_always=True)])


@contender("ours, everything on")
def ours_all(task: Task, folder: Path) -> Train:
    from pytorch_accel_lite import callbacks

    return ours(
        task,
        [
            *callbacks.get_default_callbacks(progress_bar=False),
            callbacks.ProgressBarCallback(show_always=True),
            callbacks.SaveBestModelCallback(folder / "best.pt", watch_metric="train_loss_epoch"),
            callbacks.EarlyStoppingCallback(watch_metric="train_loss_epoch"),
            callbacks.SaveTrainingStateCallback(folder / "states", save_every_n_steps=500, max_checkpoints=2),
        ],
        gradient_clip_norm=10.0,
    )


@contender("ours, monitors and loggers")
def ours_monitored(task: Task, folder: Path) -> Train:
    from pytorch_accel_lite import callbacks

    return ours(
        task,
        [
            *callbacks.get_default_callbacks(progress_bar=False),
            callbacks.ProgressBarCallback(show_always=True),
            callbacks.LearningRateMonitorCallback(),
            callbacks.GradientNormCallback(),
            callbacks.ThroughputCallback(),
            callbacks.DeviceMemoryCallback(),
            callbacks.TimingCallback(show=False),
            callbacks.MetricsFileCallback(folder / "metrics.csv", every_n_updates=50),
        ],
    )


def ancestor(task: Task, bar: bool) -> Train:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import get_default_callbacks

    class ReadyTrainer(Trainer):  # type: ignore[misc]
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return loader if task.ready else super().create_train_dataloader(batch_size, train_dl_kwargs)

    loader = DataLoader(task.batches(), batch_size=1, collate_fn=only) if task.ready else None  # type: ignore[arg-type]
    model = task.make_model()
    trainer = ReadyTrainer(model, task.loss_func, task.make_optimizer(model), get_default_callbacks(progress_bar=bar))
    workers = {"num_workers": 0, "pin_memory": False}
    return lambda: trainer.train(
        task.dataset, 1, per_device_batch_size=task.batch_size, train_dataloader_kwargs=workers
    )


@contender("pytorch-accelerated without bar")
def ancestor_default(task: Task, folder: Path) -> Train:
    return ancestor(task, bar=False)


@contender("pytorch-accelerated with bar")
def ancestor_bar(task: Task, folder: Path) -> Train:
    return ancestor(task, bar=True)


def lightning(task: Task, folder: Path, **kwargs: Any) -> Train:
    import lightning as L

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss_func = task.make_model(), task.loss_func

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.loss_func(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.make_optimizer(self.model)

    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder, **kwargs)
    module, loader = Module(), torch_loader_of(task)
    return lambda: trainer.fit(module, loader)


@contender("Lightning barebones")
def lightning_bare(task: Task, folder: Path) -> Train:
    return lightning(task, folder, barebones=True)


@contender("Lightning with bar")
def lightning_bar(task: Task, folder: Path) -> Train:
    return lightning(task, folder, logger=False, enable_model_summary=False)


@contender("Fabric")
def fabric(task: Task, folder: Path) -> Train:
    import lightning as L

    runner, loss_func = L.Fabric(accelerator="cpu", devices=1), task.loss_func
    runner.launch()
    model = task.make_model()
    model, optimizer = runner.setup(model, task.make_optimizer(model))
    loader = runner.setup_dataloaders(torch_loader_of(task))

    def train() -> None:
        for inputs, targets in loader:
            runner.backward(loss_func(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    return train


@contender("transformers.Trainer")
def transformers_trainer(task: Task, folder: Path) -> Train:
    from transformers import Trainer, TrainingArguments

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss_func = task.make_model(), task.loss_func

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": self.loss_func(self.model(x), labels)}

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(task.dataset)  # type: ignore[arg-type]

        def __getitem__(self, index: int) -> Any:
            x, labels = task.dataset[index]
            return {"x": x, "labels": labels}

    class ReadyTrainer(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return batches if batches is not None else super().get_train_dataloader()

    batches = [{"x": x, "labels": labels} for x, labels in task.batches()] if task.ready else None
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=task.batch_size,
        num_train_epochs=1,
        max_steps=task.steps,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        max_grad_norm=0.0,
        logging_strategy="epoch",
        dataloader_num_workers=0,
    )
    model = Module()
    optimizer = task.make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return ReadyTrainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, schedule)).train


def ignite(task: Task, bar: bool) -> Train:
    from ignite.engine import Engine
    from ignite.handlers import ProgressBar
    from ignite.metrics import RunningAverage

    model, loss_func = task.make_model(), task.loss_func
    optimizer = task.make_optimizer(model)

    def step(engine: Any, batch: Any) -> Any:
        loss = loss_func(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() if bar else loss.detach()

    engine, loader = Engine(step), loader_of(task)
    if bar:
        RunningAverage(output_transform=lambda loss: loss).attach(engine, "loss")
        ProgressBar().attach(engine, ["loss"])
    return lambda: engine.run(loader, max_epochs=1)


@contender("Ignite")
def ignite_bare(task: Task, folder: Path) -> Train:
    return ignite(task, bar=False)


@contender("Ignite with bar")
def ignite_bar(task: Task, folder: Path) -> Train:
    return ignite(task, bar=True)


@contender("fastai")
def fastai(task: Task, folder: Path) -> Train:
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    model = task.make_model()

    def make_optimizer(parameters: Any, **kwargs: Any) -> Any:
        return OptimWrapper(opt=task.make_optimizer(model))

    loaders = DataLoaders(torch_loader_of(task), [], device=torch.device("cpu"))
    learner = Learner(loaders, model, task.loss_func, opt_func=make_optimizer, train_bn=False, path=folder)
    return lambda: learner.fit(1, lr=1e-3)


@contender("skorch")
def skorch(task: Task, folder: Path) -> Train:
    from skorch import NeuralNet

    class Net(NeuralNet):  # type: ignore[misc]
        def get_iterator(self, dataset: Any, training: bool = False) -> Any:
            return loader if task.ready else super().get_iterator(dataset, training)

    loader = loader_of(task) if task.ready else None
    kind = type(task.make_optimizer(task.make_model()))
    rate = task.make_optimizer(task.make_model()).param_groups[0]["lr"]
    net = Net(
        task.make_model,
        criterion=nn.CrossEntropyLoss,
        optimizer=kind,
        lr=rate,
        max_epochs=1,
        batch_size=task.batch_size,
        train_split=None,
        iterator_train__shuffle=True,
    )
    net.initialize()
    return lambda: net.partial_fit(task.dataset)


@contender("Keras")
def keras(task: Task, folder: Path) -> Train:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras as K

    class Module(K.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.loss_of = task.make_model(), task.loss_func
            self.inner_optimizer = task.make_optimizer(self.inner)
            self.built = True

        def train_step(self, data: Any) -> Any:
            inputs, targets = data
            loss = self.loss_of(self.inner(inputs), targets)
            loss.backward()
            self.inner_optimizer.step()
            self.inner_optimizer.zero_grad()
            return {"loss": loss}

    model, loader = Module(), torch_loader_of(task)
    model.compile(jit_compile=False)
    return lambda: model.fit(loader, epochs=1, verbose=0)


def is_missing(error: Exception) -> bool:
    """Whether a contender's own package is not installed."""
    return isinstance(error, ModuleNotFoundError) and "benchmarks" not in str(error)
