"""Programs of random features, which are trained whole, or killed at random events and resumed.

python -m tests.random_programs [--first 0] [--programs 100]

prints the programs that end in other bits when they are killed.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from pytorch_accel_lite import Trainer, TrainerCallback, callbacks
from pytorch_accel_lite import data as sources  # some of its names are of extensions
from pytorch_accel_lite.data import OwnShard
from tests.launching import Fork
from tests.small_models import same_bits

# ---------------------------------------------------------------------------------------------------------- data


def tensors(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(5))
    return inputs, (inputs.sum(1) > 0).long()


class Noisy(Dataset[Any]):
    """Draws from all generators for each sample."""

    def __init__(self, size: int) -> None:
        self.inputs, self.targets = tensors(size)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class Failing(Noisy):
    """Cannot read one of its samples."""

    def __getitem__(self, index: int) -> Any:
        if index == 11:
            raise OSError("This sample cannot be read.")
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    """Each worker reads a part, and draws random numbers."""

    def __init__(self, size: int) -> None:
        self.data = Noisy(size)

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.data[index] for index in range(first, len(self.data), step))


class StreamOfKnownLength(Stream):
    def __len__(self) -> int:
        return len(self.data)


def weighted(size: int) -> WeightedRandomSampler:
    return WeightedRandomSampler(range(1, size + 1), size, generator=torch.Generator().manual_seed(3))


DATA: dict[str, Callable[[int, int], Any]] = {  # of a number of samples, and the batch size
    "tensors": lambda size, batch: TensorDataset(*tensors(size)),
    "samples": lambda size, batch: Noisy(size),
    "one fails": lambda size, batch: Failing(size),
    "list": lambda size, batch: [*zip(*tensors(size), strict=True)],
    "subset": lambda size, batch: Subset(Noisy(size + 3), range(size)[::-1]),
    "several": lambda size, batch: ConcatDataset([Noisy(size), TensorDataset(*tensors(3))]),
    "mixture": lambda size, batch: sources.Mixture({"a": Noisy(size), "b": Noisy(5)}, {"a": 0.7, "b": 0.3}),
    "stream": lambda size, batch: Stream(size),
    "stream of known length": lambda size, batch: StreamOfKnownLength(size),
    "shuffled stream": lambda size, batch: sources.ShuffledStream(Stream(size), block_size=5),
    "mixed streams": lambda size, batch: sources.MixtureStream({"a": Stream(size), "b": Stream(4)}),
    "own batches": lambda size, batch: OwnShard([*zip(*(part.split(batch) for part in tensors(size)), strict=True)]),
    "loader": lambda size, batch: DataLoader(Noisy(size), batch, shuffle=True),
    "loader with workers": lambda size, batch: DataLoader(Noisy(size), batch, num_workers=2, persistent_workers=True),
    "weighted loader": lambda size, batch: DataLoader(Noisy(size), batch, sampler=weighted(size)),
    "batch sampler": lambda size, batch: DataLoader(
        Noisy(size), batch_sampler=BatchSampler(RandomSampler(range(size)), batch, drop_last=False)
    ),
}
ENDLESS = {"mixed streams"}
WITHOUT_LENGTH = {"stream", "shuffled stream", *ENDLESS}
READ_IN_TURN = {*WITHOUT_LENGTH, "stream of known length", "own batches"}

# --------------------------------------------------------------------------------------- models and what trains them


class Model(nn.Module):
    """Has dropout, running statistics, an embedding that each pass normalises, and an attribute that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.signs = nn.Embedding(2, 8, max_norm=1.0)
        self.passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        hidden = self.layer(inputs) + self.signs((inputs[:, 0] > 0).long())
        if not self.training or len(hidden) > 1:
            hidden = self.norm(hidden)
        outputs: torch.Tensor = self.head(functional.dropout(hidden.relu(), 0.2, self.training))
        return outputs


class ScaledLoss(nn.Module):
    """Learns a scale, and has a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs * self.scale, targets)
        if self.training:
            self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss + 0.1 * self.mean


class WithCritic(Trainer):
    """Has a second module with an optimizer of its own, a memory of outputs, and a generator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic = nn.Linear(2, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        self.memory: deque[torch.Tensor] = deque(maxlen=3)
        self.generator = torch.Generator().manual_seed(1)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        self.memory.append(output["model_outputs"].detach().mean(0))
        noise = torch.randn((), generator=self.generator) * torch.stack([*self.memory]).mean()
        return {**output, "loss": output["loss"] + noise * output["model_outputs"].mean()}

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.critic(torch.ones(1, 2)).square().sum().backward()
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()


class Mixing(Trainer):
    """Mixes the samples of a batch, by random numbers of NumPy and torch."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        share, order = np.random.beta(1, 1), torch.randperm(len(inputs))
        outputs = self.model(share * inputs + (1 - share) * inputs[order])
        loss = share * self.loss_func(outputs, targets) + (1 - share) * self.loss_func(outputs, targets[order])
        return {"loss": loss, "model_outputs": outputs, "batch_size": len(inputs)}


class Updating(Trainer):
    """Updates by itself, in a ``train_step``."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        outputs = self.model(batch[0])
        loss = self.loss_func(outputs, batch[1])
        self.update(loss)
        return {"loss": loss, "model_outputs": outputs, "batch_size": len(outputs)}


class Sharpness(Trainer):
    """Computes each update twice: at the weights, and where the loss is greater (SAM)."""

    def optimizer_step(self) -> None:
        moved = [(p, 0.05 * p.grad.sign()) for p in self.model.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, step in moved:
                parameter.add_(step)
        self.recompute_gradients()
        with torch.no_grad():
            for parameter, step in moved:
                parameter.sub_(step)
        super().optimizer_step()


class Weighing(Trainer):
    """Weighs each batch by a number of items, adds up losses by name, and logs numbers of its own."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        self.log("mean", output["model_outputs"].mean())
        losses = {"fit": output["loss"], "size": 0.1 * output["model_outputs"].square().mean()}
        return {**output, "loss": losses, "num_items_in_batch": 1 + batch[1].sum()}


class Student(Trainer):
    """Learns from a teacher that follows its weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        difference = output["model_outputs"] - self.teacher(batch[0])
        return {**output, "loss": output["loss"] + difference.square().mean()}


PLAIN_TRAINERS: dict[str, type[Trainer]] = {
    "plain": Trainer,
    "mixing": Mixing,
    "weighing": Weighing,
    "student": Student,
}
TRAINERS = {**PLAIN_TRAINERS, "critic": WithCritic, "updating": Updating, "sharpness": Sharpness}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=0.01),
    "factory": lambda parameters: partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "two": lambda parameters: {
        "first": torch.optim.SGD(parameters[:3], lr=0.05, momentum=0.9),
        "rest": torch.optim.Adagrad(parameters[3:], lr=0.01),
    },
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "none": {},
    "cosine": {"create_scheduler_fn": "cosine", "warmup_steps": 2},
    "wsd": {"create_scheduler_fn": "wsd", "warmup_steps": 0.2},
    "decay": {"create_scheduler_fn": partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step))},
    "restarts": {"create_scheduler_fn": partial(CosineAnnealingWarmRestarts, T_0=3, T_mult=2)},
    "epochs": {"create_scheduler_fn": partial(StepLR, step_size=1, gamma=0.5), "scheduler_interval": "epoch"},
    "plateau": {
        "create_scheduler_fn": partial(ReduceLROnPlateau, patience=0, factor=0.5),
        "scheduler_interval": "epoch",
        "scheduler_metric": "eval_loss_epoch",
    },
}

# ----------------------------------------------------------------------------------------------------- callbacks


class Noise(TrainerCallback):
    """Changes gradients by random numbers, and by what it remembers."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.draws = np.random.default_rng(3)

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.losses = [*self.losses[-3:], float(kwargs["batch_output"]["loss"])]

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        for parameter in trainer.get_model().parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.01 * torch.randn_like(parameter.grad) + 0.01 * self.draws.normal())
                parameter.grad.mul_(1 + 0.01 * sum(self.losses))


class Remembers(TrainerCallback):
    """Changes gradients by attributes of many kinds."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}
        self.total, self.updates, self.draws = torch.zeros(3), {0}, random.Random(3)

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.by_step[trainer.progress.step % 3] = float(kwargs["batch_output"]["loss"])
        self.total = self.total + self.draws.random()
        self.updates.add(trainer.progress.update)

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        scale = 1 + 0.001 * (self.total[0].item() + sum(self.by_step.values()) + len(self.updates))
        for parameter in trainer.get_model().parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)


class Decays(TrainerCallback):
    """Changes an option of the optimizer by the progress."""

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        for group in trainer.optimizer.param_groups:
            group["weight_decay"] = 0.01 * trainer.progress.update


class Freezes(TrainerCallback):
    """Trains a layer from the second epoch on."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.get_model().layer.requires_grad_(trainer.progress.epoch > 1)


class Evaluates(TrainerCallback):
    """Evaluates and predicts within the epoch."""

    def __init__(self) -> None:
        self.data = TensorDataset(*tensors(5))

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update % 3 == 1:
            trainer.evaluate(self.data)
            trainer.predict(self.data)


class Shifts(TrainerCallback):
    """Changes the data before each epoch."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        data = trainer.train_dataset
        if isinstance(data, Noisy):
            data.inputs = tensors(len(data))[0] + 0.1 * trainer.progress.epoch


class Stops(TrainerCallback):
    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == 6:
            raise callbacks.StopTrainingError("enough")


CALLBACKS: dict[str, Callable[[Path], TrainerCallback]] = {
    "noise": lambda folder: Noise(),
    "remembers": lambda folder: Remembers(),
    "decays": lambda folder: Decays(),
    "skips": lambda folder: callbacks.SkipFailedBatchesCallback(100),
    "teacher": lambda folder: callbacks.MomentumTeacherCallback(0.9),
    "freezes": lambda folder: Freezes(),
    "evaluates": lambda folder: Evaluates(),
    "shifts": lambda folder: Shifts(),
    "stops": lambda folder: Stops(),
    "average": lambda folder: callbacks.ModelEmaCallback(0.9, save_path=folder / "average.pt"),
    "second average": lambda folder: callbacks.ModelEmaCallback(0.8, save_path=None, prefix="second_", warmup=True),
    "best": lambda folder: callbacks.SaveBestModelCallback(folder / "best.pt"),
    "early": lambda folder: callbacks.EarlyStoppingCallback(1, 0.0),
    "early within epochs": lambda folder: callbacks.EarlyStoppingCallback(2, 0.0, patience_in="evaluations"),
    "metrics": lambda folder: callbacks.MetricsCallback("acc", train=True, num_classes=2),
    "spikes": lambda folder: callbacks.GradientSpikeCallback(1.2, warm_up_updates=2),
    "worst": lambda folder: callbacks.WorstSamplesCallback(3, partial(functional.cross_entropy, reduction="none")),
    "limit": lambda folder: callbacks.LimitBatchesCallback(3),
    "rates": lambda folder: callbacks.LearningRateMonitorCallback(),
}


class Kills(TrainerCallback):
    """Ends the process, as a kill does, at one of the calls of an event."""

    affects_training = False
    saves_attributes = False

    def __init__(self, event: str, calls: int) -> None:
        self.left = calls
        setattr(self, event, self._count)

    def _count(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if not self.left:
            os._exit(KILLED)


KILLED = 9
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
_INTERVALS = ("2 updates", "3 updates", "0.5 epochs", "7 samples")
_COUNTED = ("2 updates", "3 updates", "7 samples")  # without the length of an epoch


class Program:
    """A program whose features are drawn by a number."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.number, self.data = number, draw.choice([*DATA])
        self.size, self.batch_size = draw.choice([7, 16, 23]), draw.choice([2, 3, 5, 8])
        self.trainer = draw.choice([*TRAINERS, "plain", "plain"])
        self.loss = draw.choice(["cross entropy", "scaled"])
        is_plain = self.trainer in PLAIN_TRAINERS
        # An update of a closure, or of two optimizers, has steps of its own.
        self.optimizer = draw.choice([*OPTIMIZERS] if is_plain else ["sgd", "adamw", "factory"])
        self.schedule = draw.choice([*SCHEDULES])
        drawn = [name for name in CALLBACKS if draw.random() < 0.12]
        can_skip = is_plain and self.optimizer != "lbfgs"
        self.data = self.data if can_skip or self.data != "one fails" else "samples"
        needed = {"skips": self.data == "one fails", "teacher": self.trainer == "student"}
        possible = {"skips": can_skip, "teacher": self.trainer == "student"}
        self.callbacks = [n for n in CALLBACKS if needed.get(n) or (n in drawn and possible.get(n, True))]
        self.precision, self.workers = draw.choice([None, None, None, "bf16"]), draw.choice([0, 0, 0, 1, 2])
        has_shares = can_skip and "skips" not in self.callbacks and self.data not in READ_IN_TURN
        self.logical = draw.choice([None, None, 2, 3]) if has_shares and self.trainer != "critic" else None
        self.seed = 1 if self.logical else draw.choice([None, 1])
        has_length = self.data not in WITHOUT_LENGTH
        intervals = _INTERVALS if has_length else _COUNTED
        self.save_every = draw.choice(["1 updates", *intervals])
        self.asynchronous, self.keep = draw.random() < 0.3, draw.choice([None, 1, 2])
        self.kills = [(draw.choice(EVENTS), draw.randint(1, 12)) for _ in range(draw.choice([1, 1, 2, 3]))]
        needs_limit = self.data in ENDLESS or (self.schedule in ("cosine", "wsd") and not has_length)
        self.arguments = {
            "num_epochs": draw.choice([1, 2, 3]),
            "max_num_train_steps": draw.choice([7, 9] if needs_limit else [None, None, 5, 9]),
            "gradient_accumulation_steps": draw.choice([1, 1, 2, 3, {0: 1, 3: 2}]),
            "gradient_clip_norm": draw.choice([None, 0.5]),
            "gradient_clip_value": draw.choice([None, None, 0.05]),
            "evaluate_every": draw.choice([None, None, *intervals]),
        }

    def train(self, folder: Path, resumes: bool = False, kills: tuple[str, int] | None = None) -> Trainer:
        """Train the program; if it resumes, from the latest state in the folder, in place of what it draws itself."""
        is_resumed = resumes and any(folder.glob("states/*/manifest.json"))
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(9 if is_resumed else 0)
        loss_func = ScaledLoss() if self.loss == "scaled" else nn.CrossEntropyLoss()
        model = Model()
        optimizer = OPTIMIZERS[self.optimizer]([*model.parameters(), *loss_func.parameters()])
        saving = callbacks.SaveTrainingStateCallback(
            folder / "states", save_every=self.save_every, asynchronous=self.asynchronous, max_checkpoints=self.keep
        )
        listening = [*(CALLBACKS[name](folder) for name in self.callbacks), saving]
        listening += [Kills(*kills)] if kills else []
        trainer = TRAINERS[self.trainer](
            model,
            loss_func,
            optimizer,
            listening,
            seed=self.seed,
            mixed_precision=self.precision,
            logical_processes=self.logical,
        )
        data, arguments = DATA[self.data](self.size, self.batch_size), {**self.arguments, **SCHEDULES[self.schedule]}
        if not isinstance(data, (DataLoader, OwnShard)):
            arguments["train_dataloader_kwargs"] = {"num_workers": self.workers}
        trainer.train(
            data,
            eval_dataset=TensorDataset(*tensors(11)),
            per_device_batch_size=self.batch_size,
            resume_from="latest" if resumes else None,
            **arguments,
        )
        return trainer

    def train_killed(self, folder: Path) -> Trainer:
        """Train the program, which is killed and resumed."""
        for kill in self.kills:
            process = Fork(partial(self.train, folder, resumes=True, kills=kill), folder / "output")
            if process.wait() != KILLED:
                break
        assert process.wait() in (0, KILLED), (folder / "output").read_text()
        return self.train(folder, resumes=True)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in vars(self).items())


def results(trainer: Trainer) -> dict[str, Any]:
    """Return everything that a run ends with."""
    averages = [one.ema.module.state_dict() for one in trainer.callback_handler if hasattr(one, "ema")]
    scheduler = trainer.scheduler.state_dict() if trainer.scheduler is not None else {}
    return {
        "weights": trainer.get_model().state_dict(),
        "passes": trainer.get_model().passes,
        "loss function": trainer.loss_func.state_dict(),
        "critic": trainer.critic.state_dict() if isinstance(trainer, WithCritic) else None,
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": {name: value for name, value in scheduler.items() if not callable(value) and name != "lr_lambdas"},
        "averages": averages,
        "best values": [one.best_metric for one in trainer.callback_handler if hasattr(one, "best_metric")],
        "history": trainer.run_history.to_dict(),
        "progress": (trainer.progress.epoch, trainer.progress.update, trainer.progress.samples),
        "stop": trainer.run.end.reason,
    }


def differences(program: Program, folder: Path) -> list[str]:
    """Return the names of the results that differ if the program is killed and resumed."""
    (folder / "whole").mkdir()
    (folder / "killed").mkdir()
    whole, killed = results(program.train(folder / "whole")), results(program.train_killed(folder / "killed"))
    return [name for name in whole if not same_bits(whole[name], killed[name])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=100)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of what random programs do
    torch.set_num_threads(1)  # forks of this process cannot use more
    for number in range(arguments.first, arguments.first + arguments.programs):
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
            found = differences(program := Program(number), Path(folder))
        if found:
            print(f"{', '.join(found)}\n{program}\n", flush=True)


if __name__ == "__main__":
    main()
