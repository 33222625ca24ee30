"""A run on an iterable of the user's own: own_iterable.py FOLDER KIND [SEED [UPDATE]]

The last rank is killed when it first comes to that update. Started again, the run resumes; what it ended with is
written to FOLDER/final.pt.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.ranks import rank, world_size
from tests.small_models import weights

EPOCHS = 3


class Shuffles:
    """Ready batches, shuffled for each pass."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for index in torch.randperm(len(self.batches)).tolist():
            yield self.batches[index]


class ShufflesAtOnce(Shuffles):
    """Draws its order when the iteration begins, not when the first batch is asked for."""

    def __iter__(self) -> Any:
        return iter(random.sample(self.batches, len(self.batches)))


class Draws(Shuffles):
    """Draws each batch, and noise for it, from all generators."""

    def __iter__(self) -> Any:
        for _ in self.batches:
            x, y = self.batches[np.random.randint(len(self.batches))]
            yield x + torch.randn_like(x) + random.random(), y


class HasGenerator(Shuffles):
    """Draws from a generator of its own."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches)
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Any:
        order = torch.randperm(len(self.batches), generator=self.generator).tolist()
        return map(self.batches.__getitem__, order)


class ShufflesInPlace(Shuffles):
    """Each order follows from the one before."""

    def __iter__(self) -> Any:
        random.shuffle(self.batches)
        return iter(self.batches)


KINDS = {
    "shuffles": Shuffles,
    "at once": ShufflesAtOnce,
    "draws": Draws,
    "lengths": Shuffles,
    "generator": HasGenerator,
    "in place": ShufflesInPlace,
}


def make_batches(kind: str, rank: int = 0, world_size: int = 1) -> Any:
    """Return the batches of a process: of 3 sequences of 4 steps or, with ``"lengths"``, of some of other lengths."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for number in range(8):
        rows, steps = (1 + number % 4, 2 + number % 3) if kind == "lengths" else (3, 4)
        x = torch.randn(rows, steps, 2, generator=generator)
        batches.append((x, x.sum((1, 2))))
    return KINDS[kind](batches[rank::world_size])


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 4, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.cell(x)[0][:, -1])).squeeze(1)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Sequences()
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def by_hand(kind: str) -> dict[str, torch.Tensor]:
    """The hand-written loop."""
    model, optimizer = make()
    batches = make_batches(kind)
    for _ in range(EPOCHS):
        for x, y in batches:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


class Killed(TrainerCallback):
    def __init__(self, folder: Path, update: int) -> None:
        self.mark = folder / "killed"
        self.update = update

    def on_train_step_checkpoint(self, trainer, **kwargs):
        if trainer.progress.update == self.update and rank() == world_size() - 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class OwnBatches(Trainer):
    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return make_batches(self.train_dataset, rank(), world_size())


class Records(TrainerCallback):
    """Records the batch of every step and random numbers drawn after it."""

    saves_attributes = False  # those of a run alone

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.drawn: list[Any] = []

    def on_train_step_end(self, trainer, batch, **kwargs):
        self.seen.append(batch[0].sum().item())
        self.drawn.append(torch.rand(()).item() + np.random.rand() + random.random())


def train(kind: str, callbacks: Any = (), seed: int | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
    model, optimizer = make()
    trainer = OwnBatches(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=seed)
    trainer.train(kind, EPOCHS, **kwargs)
    return weights(model)


def main() -> None:
    torch.set_num_threads(1)
    folder, kind, seed, update = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    records, saving = Records(), SaveTrainingStateCallback(folder / "states", save_every_n_steps=1)
    callbacks = [records, saving, Killed(folder, update)]
    trained = train(kind, callbacks, None if seed < 0 else seed, resume_from="latest")
    ended = {"weights": trained, "seen": records.seen, "drawn": records.drawn, "processes": world_size()}
    torch.save(ended, folder / f"final{rank()}.pt")


if __name__ == "__main__":
    main()
