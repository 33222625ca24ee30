"""State that a trainer carries from step to step, as in truncated backpropagation through time."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.ranks import IN_ORDER, rank, shared_folder, world_size
from tests.small_models import equal_weights, largest_difference, weights

STREAMS = 6


WINDOWS = 4


def _windows() -> TensorDataset:
    """Windows of three steps: each row of a batch of six continues that row of the batch before."""
    generator = torch.Generator().manual_seed(1)
    streams = torch.randn(STREAMS, WINDOWS * 3, 2, generator=generator, dtype=torch.float64)
    inputs, targets = (
        values.unfold(1, 3, 3).transpose(0, 1).flatten(0, 1).transpose(1, 2) for values in (streams, streams.cumsum(1))
    )
    return TensorDataset(inputs.contiguous(), targets.contiguous())


DATA = _windows()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, hidden: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, hidden = self.cell(inputs, None if hidden is None else hidden.transpose(0, 1).contiguous())
        return self.head(outputs), hidden.transpose(0, 1)


class Memory:
    """The hidden state of each stream; its saved state has the rows of all processes."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.hidden: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"hidden": self.trainer.gather(self.hidden)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        hidden = state["hidden"]
        ranks = self.trainer.ranks
        self.hidden = None if hidden is None else hidden.chunk(ranks.world_size)[ranks.rank]


class Truncated(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory = Memory(self)
        self.register_for_checkpointing("memory", self.memory)

    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        self.memory.hidden = None

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        outputs, hidden = self.model(inputs, self.memory.hidden)
        self.memory.hidden = hidden.detach()
        return {"loss": self.loss_func(outputs, targets), "model_outputs": outputs}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Recurrent().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def train(folder: Path | None = None, **kwargs: Any) -> Truncated:
    """Train for two epochs."""
    callbacks = []
    if folder is not None:
        callbacks = [SaveTrainingStateCallback(folder, save_every_n_steps=3, max_checkpoints=None)]
    model, optimizer = make()
    trainer = Truncated(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=0)
    trainer.train(DATA, 2, per_device_batch_size=STREAMS // world_size(), train_dataloader_kwargs=IN_ORDER, **kwargs)
    return trainer


def saved() -> str | None:
    """Save all states of a run in a folder that the caller removes, and return it on the first process."""
    with shared_folder() as folder:
        kept = tempfile.mkdtemp() if rank() == 0 else None
        train(folder / "states")
        if kept is not None:
            (folder / "states").rename(Path(kept, "states"))
    return kept


def by_hand() -> dict[str, torch.Tensor]:
    """The hand-written loop."""
    model, optimizer = make()
    for _ in range(2):
        hidden = None
        for inputs, targets in DataLoader(DATA, STREAMS):
            outputs, hidden = model(inputs, hidden)
            hidden = hidden.detach()
            nn.functional.mse_loss(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_truncated_backpropagation_has_the_bits_of_a_plain_loop():
    assert equal_weights(weights(train().model), by_hand())


def trained_and_resumed() -> dict[str, Any]:
    """Return the weights after a run, and after those that resumed from each of its states."""
    with shared_folder() as folder:
        whole = train(folder / "whole")
        states = sorted(state for state in (folder / "whole").iterdir() if state.is_dir())
        resumed = [weights(train(folder / "again", resume_from=state).get_model()) for state in states]
    return {"whole": weights(whole.get_model()), "resumed": resumed}


@pytest.mark.thorough
def test_processes_carry_their_rows_and_resume_to_the_same_bits(job):
    alone = trained_and_resumed()
    for found in (alone, *job(3)(trained_and_resumed)):
        assert largest_difference(found["whole"], alone["whole"]) < 1e-12
        assert len(found["resumed"]) == 3
        assert all(equal_weights(resumed, found["whole"]) for resumed in found["resumed"])


def test_one_process_resumes_with_the_rows_of_two(two_ranks, tmp_path):
    folder = next(filter(None, two_ranks(saved)))
    try:
        for state in sorted(Path(folder, "states").glob("update-*")):
            resumed = train(tmp_path, resume_from=state)
            assert largest_difference(weights(resumed.model), by_hand()) < 1e-12
    finally:
        shutil.rmtree(folder)


@pytest.mark.extension("tuning")
def test_finding_a_learning_rate_restores_a_registered_object():
    trainer = train()
    before = trainer.memory.hidden
    trainer.find_lr(DATA, 6, num_steps=10, train_dataloader_kwargs={"shuffle": False})
    assert torch.equal(trainer.memory.hidden, before)
