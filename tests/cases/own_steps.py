"""Steps of the user's own: a small GAN, and the same by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import shared_folder, world_size
from tests.launching import some_of
from tests.tasks import listener

REAL = TensorDataset(torch.randn(26, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
NOISE = torch.randn(26, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
FULL = TensorDataset(REAL.tensors[0], NOISE)


def make_networks() -> tuple[nn.Module, nn.Module]:
    """A generator and a critic."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return generator, critic


def make_optimizers(generator: nn.Module, critic: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {
        "generator": torch.optim.Adam(generator.parameters(), lr=0.02),
        "critic": torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9),
    }


class GAN(Trainer):
    """The critic is updated first, then the generator, which uses the new critic."""

    def __init__(self, normalises: bool = False, **kwargs: Any) -> None:
        generator, self.critic = make_networks()
        if normalises:
            for network in (generator, self.critic):
                network.insert(1, nn.BatchNorm1d(6).double())
        optimizers = make_optimizers(generator, self.critic)
        super().__init__(generator, None, optimizers, **{"callbacks": []} | kwargs)

    def train_step(self, batch: Any) -> None:
        real, noise = batch
        fake = self.model(noise)
        scores = self.critic(torch.cat([real, fake.detach()]))
        self.update(scores[len(real) :].mean() - scores[: len(real)].mean(), "critic")
        self.update(-self.critic(fake).mean(), "generator")

    def networks(self) -> dict[str, torch.Tensor]:
        """All weights."""
        named = {"generator": self.get_model(), "critic": self.critic}
        return {f"{of}.{name}": value.clone() for of, m in named.items() for name, value in m.state_dict().items()}


def train_gan(folder: Path | None = None, **kwargs: Any) -> GAN:
    """Train for two epochs."""
    callbacks = []
    if folder is not None:
        callbacks = [SaveTrainingStateCallback(folder, save_every_n_steps=1, max_checkpoints=None)]
    trainer = GAN(callbacks=callbacks, seed=0)
    arguments = {"per_device_batch_size": 4 // world_size(), "train_dataloader_kwargs": {"shuffle": False}} | kwargs
    trainer.train(FULL, 2, **arguments)
    return trainer


def normalised() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return the networks after each update of a run with batch norm, and of one resumed from its middle."""
    found: list[list[dict[str, torch.Tensor]]] = []
    with shared_folder() as folder:
        for resume_from in (None, folder / "whole" / "update-000000003"):
            seen: list[dict[str, torch.Tensor]] = []
            looking = listener(on_update_end=lambda trainer, seen=seen, **_: seen.append(trainer.networks()))
            saving = SaveTrainingStateCallback(folder / ("again" if resume_from else "whole"), save_every_n_steps=3)
            trainer = GAN(normalises=True, callbacks=[saving, looking], seed=0)
            trainer.train(FULL, 2, per_device_batch_size=2, resume_from=resume_from)
            found.append(seen)
    return found[0], found[1]


def trained_and_resumed(**kwargs: Any) -> dict[str, Any]:
    """Return the weights after a run, and after those that resumed from some of its states."""
    with shared_folder() as folder:
        whole = train_gan(folder / "whole", **kwargs)
        states = some_of(sorted(state for state in (folder / "whole").iterdir() if state.is_dir()))
        resumed = [train_gan(folder / "again", resume_from=state, **kwargs).networks() for state in states]
    history = {name: list(values) for name, values in whole.run_history.to_dict().items()}
    return {"whole": whole.networks(), "resumed": resumed, "history": history, "updates": whole.progress.update}


def accumulated() -> dict[str, torch.Tensor]:
    """The weights after a run with windows of three batches."""
    return train_gan(gradient_accumulation_steps=3).networks()


def by_hand(accumulation: int = 1, clip: float | None = None) -> dict[str, torch.Tensor]:
    """The loop that one would write."""
    generator, critic = make_networks()
    optimizers = make_optimizers(generator, critic)
    models = {"generator": generator, "critic": critic}
    batches = [tuple(tensor[i : i + 4] for tensor in FULL.tensors) for i in range(0, 26, 4)]
    windows = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]

    def step(name: str) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(models[name].parameters(), clip)
        optimizers[name].step()
        optimizers[name].zero_grad()

    for window in windows * 2:
        size = sum(len(real) for real, _ in window)
        for number, (real, noise) in enumerate(window, start=1):
            share = 1 if accumulation == 1 else len(real) / size
            fake = generator(noise)
            scores = critic(torch.cat([real, fake.detach()]))
            ((scores[len(real) :].mean() - scores[: len(real)].mean()) * share).backward()
            if number == len(window):
                step("critic")
            (-critic(fake).mean() * share).backward(inputs=list(generator.parameters()))
            if number == len(window):
                step("generator")
    of = {"generator": generator, "critic": critic}
    return copy.deepcopy({f"{n}.{name}": v for n, m in of.items() for name, v in m.state_dict().items()})


def with_an_idle_rank(**kwargs: Any) -> dict[str, torch.Tensor]:
    """The weights after epochs whose last step has a single sample, and windows that end with it."""
    trainer = GAN(seed=0)
    data = TensorDataset(REAL.tensors[0][:13], NOISE[:13])
    size = {"per_device_batch_size": 4 // world_size(), "train_dataloader_kwargs": {"shuffle": False}}
    trainer.train(data, 2, gradient_accumulation_steps=2, gradient_clip_norm=0.5, **size)
    return trainer.networks()


COUNTS = [1.0, 4.0, 2.0, 2.0, 7.0, 1.0, 3.0, 5.0, 1.0, 1.0, 2.0]


class OverItems(Trainer):
    """The loss is a mean over the items of all samples: that of a sample with n of them is n."""

    returns = False

    def train_step(self, batch: Any) -> Any:
        items = batch.sum()
        loss = batch.square().sum() / items + 0 * self.model(batch).sum()
        self.update(loss, num_items=items)
        return {"loss": loss} if self.returns else None


def mean_over_items(batch_size: int = 4, returns: bool = False) -> float:
    """The loss that is recorded for an epoch."""
    model = nn.Linear(1, 1)
    trainer = OverItems(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    trainer.returns = returns
    trainer.train([torch.tensor([count]) for count in COUNTS], 1, per_device_batch_size=batch_size)
    return float(trainer.run_history.get_latest_metric("train_loss_epoch"))
