"""Saved models, and stand-ins for models of other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from accelerate import Accelerator
from torch import nn

from pytorch_accel_lite import Trainer
from tests.ranks import rank
from tests.sharded import create_model, gathered, shard
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model

DATA, OTHER_DATA = float64_data(24), float64_data(8)


def trained(*callbacks: Any, epochs: int = 3, model: nn.Module | None = None, **kwargs: Any) -> Trainer:
    trainer = adamw_trainer(float64_model() if model is None else model, callbacks=list(callbacks), seed=0)
    trainer.train(DATA, epochs, **{"eval_dataset": OTHER_DATA, "per_device_batch_size": 8} | kwargs)
    return trainer


def saved_sharded(folder: Path, *places: str) -> dict[str, Any]:
    """The weights of a sharded model, which is saved in a folder and elsewhere, and loaded from each."""
    trainer = Trainer(shard(create_model(), "fsdp"), nn.MSELoss(), None, [], accelerator=Accelerator(cpu=True))
    before = gathered(trainer.model.state_dict())
    for path in (folder / "sharded", *places):
        trainer.save_model(path)
        for parameter in trainer.model.parameters():
            nn.init.zeros_(parameter)
        trainer.load_checkpoint(path)
        assert equal_weights(gathered(trainer.model.state_dict()), before)
    if rank() == 0:
        (folder / "file").touch()
    trainer.barrier()
    with pytest.raises((ValueError, RuntimeError), match="is a file, but should be a directory"):
        trainer.save_model(folder / "file")
    return before


def make_timm(**kwargs: Any) -> Any:
    timm = pytest.importorskip("timm")
    return timm.create_model("mobilenetv3_small_050", **kwargs)


class ModelMixin(nn.Module):
    """A stand-in for the ModelMixin of diffusers: saving and loading only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.config = {"width": width}
        self.layer = nn.Linear(width, width)

    def save_config(self, folder: Any) -> None:
        (Path(folder) / "config.json").write_text(json.dumps(self.config))

    @classmethod
    def from_pretrained(cls, folder: Any) -> ModelMixin:
        model = cls(**json.loads((Path(folder) / "config.json").read_text()))
        model.load_state_dict(safetensors.torch.load_file(Path(folder) / "diffusion_pytorch_model.safetensors"))
        return model
