"""A trainer to save, a model, and files to load or to damage, for tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from pytorch_accel_lite import Trainer
from tests.small_models import make_model, make_trainer, train


def trained(seed: int = 0, **kwargs: Any) -> Trainer:
    """A trainer after two epochs of Adam under a schedule."""
    model = make_model(seed)
    trainer = make_trainer(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    return train(trainer, epochs=2, create_scheduler_fn=lambda optimizer: StepLR(optimizer, 1, gamma=0.9), **kwargs)


def save_file(path: Path, model: nn.Module, prefix: str = "", **more: Any) -> Path:
    """Write a checkpoint with torch alone, its keys prefixed."""
    torch.save({"model_state_dict": {f"{prefix}{k}": v for k, v in model.state_dict().items()}, **more}, path)
    return path


class Holder(nn.Module):
    """A model with a part that is really called ``module``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.module = make_model(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def flip(path: Path, position: int, bit: int = 0x40) -> bytes:
    """Change a byte of a file, and return what it was before."""
    content = path.read_bytes()
    path.write_bytes(content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :])
    return content
