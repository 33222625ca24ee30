"""A program like minGPT: a small transformer with weight decay groups and clipped gradients."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import EarlyFork, run_forked
from tests.small_models import equal_weights, listener, weights

TEXT = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer"
LETTERS = sorted(set(TEXT))
LENGTH, WIDTH, HEADS = 12, 32, 2
EPOCHS, BATCH, LIMIT, SEED = 3, 8, 0.5, 5


def sequences() -> TensorDataset:
    codes = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    windows = codes.unfold(0, LENGTH + 1, 2)
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop, self.blocks = nn.Dropout(0.1), nn.Sequential(Block(), Block())
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.blocks(self.drop(self.wte(idx) + self.wpe.weight[: idx.shape[1]]))
        logits = self.lm_head(self.ln_f(x))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def create() -> tuple[GPT, torch.optim.Optimizer]:
    """Matrices of linear layers are decayed; biases, norms and embeddings are not, and come in a group behind them."""
    torch.manual_seed(0)
    model = GPT()
    decays = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = dict(sorted(model.named_parameters()))
    groups = [
        {"params": [named[name] for name in named if name in decays], "weight_decay": 0.1},
        {"params": [named[name] for name in named if name not in decays], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def by_hand() -> dict[str, torch.Tensor]:
    model, optimizer = create()
    set_seed(SEED)
    loader = DataLoader(sequences(), BATCH, generator=torch.Generator())  # leaves the global one to dropout
    for _ in range(EPOCHS):
        for x, y in loader:
            _, loss = model(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


class GPTTrainer(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> Any:
        logits, loss = self.model(*batch)
        return {"loss": loss, "model_outputs": logits, "batch_size": len(logits)}


def by_trainer(folder: Path | None = None, killed_at: int | None = None) -> dict[str, torch.Tensor]:
    """Train.

    Args:
        folder: where states are saved and resumed from, if anywhere
        killed_at: the update after which the process is killed
    """

    def die(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    model, optimizer = create()
    states = [] if folder is None else [SaveTrainingStateCallback(folder, save_every_n_steps=2)]
    trainer = GPTTrainer(model, None, optimizer, [*states, listener(on_update_end=die)], seed=SEED)
    trainer.train(
        sequences(),
        EPOCHS,
        per_device_batch_size=BATCH,
        gradient_clip_norm=LIMIT,
        train_dataloader_kwargs={"shuffle": False},
        resume_from=None if folder is None else "latest",
    )
    assert trainer.progress.update == 15
    return weights(model)


def test_a_clipped_and_decayed_run_equals_the_loop():
    assert equal_weights(by_trainer(), by_hand())


@pytest.mark.programs
def test_a_run_killed_in_each_epoch_equals_the_loop(tmp_path):
    for update, saved in ((3, 2), (9, 8)):
        killed = run_forked(partial(by_trainer, tmp_path, killed_at=update), kind=EarlyFork)
        assert killed.returncode == -signal.SIGKILL, killed.stdout
        assert max(tmp_path.glob("update-*")).name == f"update-{saved:09d}"
    assert equal_weights(by_trainer(tmp_path), by_hand())
