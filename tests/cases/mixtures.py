"""Training on mixtures, on one process or several."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import Dataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import Mixture
from tests.cases.common import world_size
from tests.cases.data import SavesEachUpdate
from tests.tasks import weights


class Numbers(Dataset[Any]):
    """Numbers from ``first`` on, each with noise of its own."""

    def __init__(self, first, size, noise=1.0):
        self.first, self.size, self.noise = first, size, noise

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.stack([torch.tensor(float(self.first + index)), self.noise * torch.rand(())]).double()


def mixture(noise: float = 1.0, **kwargs: Any) -> Mixture:
    return Mixture({"a": Numbers(0, 10, noise), "b": Numbers(100, 25, noise)}, **kwargs)


SEPARATE = {"weights": {"a": 7, "b": 3}, "num_samples": 50, "mix_batches": False, "batch_sizes": {"b": 2}}
MIXED = {"weights": {"a": 0.7, "b": 0.3}}


class Keeps(TrainerCallback):
    """Keeps the name and the samples of each step, and where they were in the mixture."""

    def __init__(self):
        self.names = []
        self.seen = []

    def on_train_step_end(self, trainer, batch, **kwargs):
        self.names.append(trainer.train_dataset_name)
        indices = trainer.batch_indices
        self.seen.append(batch[: len(indices)])
        data = trainer.train_dataset
        assert [data.name_of(index) for index in indices] == ["ab"[int(x) // 100] for x in self.seen[-1][:, 0]]


class PerDataset(Trainer):
    """Logs the loss of each dataset."""

    def calculate_train_batch_loss(self, batch):
        loss = self.model(batch).square().mean()
        if self.train_dataset_name is not None:
            self.log(f"{self.train_dataset_name}_loss", loss)
        return {"loss": loss, "batch_size": len(batch)}

    def calculate_eval_batch_loss(self, batch):
        return {"loss": batch[:, 0].sum(), "batch_size": len(batch)}


def train_mixture(
    kind: dict[str, Any], folder: Any = None, batch_size: int = 3, epochs: int = 2, seed: int | None = 5, **kwargs: Any
) -> Any:
    """Train on a mixture; save a state at each update in ``folder``."""
    model = nn.Linear(2, 1).double()
    nn.init.constant_(model.weight, 0.01)
    nn.init.zeros_(model.bias)
    keeps = Keeps()
    callbacks = [keeps] if folder is None else [keeps, SavesEachUpdate(folder)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    trainer = PerDataset(model, None, optimizer, callbacks=callbacks, seed=seed)
    kwargs = {"train_dataloader_kwargs": {"num_workers": 0}} | kwargs
    trainer.train(mixture(**kind), epochs, per_device_batch_size=batch_size, **kwargs)
    return {
        "names": keeps.names,
        "seen": keeps.seen,
        "weights": weights(model),
        "history": trainer.run_history.to_dict(),
        "world_size": world_size(),
    }


class TwoHeads(nn.Module):
    """A head for each dataset."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(2, 3)
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
        self.double()

    def forward(self, x, name):
        return self.heads[name](self.trunk(x).tanh())


class UsesHeads(Trainer):
    """Trains the head of the dataset that the batch is from."""

    def calculate_train_batch_loss(self, batch):
        loss = self.model(batch, self.train_dataset_name).square().mean()
        return {"loss": loss, "batch_size": len(batch)}


def train_heads(batch_size: int, small: int) -> dict[str, torch.Tensor]:
    """Train heads; the last batch of ``b`` has a single sample, which only the first process has."""
    torch.manual_seed(0)
    model = TwoHeads()
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[unused])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = UsesHeads(model, None, optimizer, callbacks=[], seed=5, accelerator=accelerator)
    data = Mixture({"a": Numbers(0, 10, 0), "b": Numbers(100, 25, 0)}, mix_batches=False, batch_sizes={"b": small})
    trainer.train(
        data,
        1,
        per_device_batch_size=batch_size,
        gradient_accumulation_steps=2,
        train_dataloader_kwargs={"num_workers": 0},
    )
    return weights(model)
