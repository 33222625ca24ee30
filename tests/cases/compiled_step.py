"""Steps compiled on each of several processes."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import shared_folder, world_size
from tests.tasks import equal, largest_difference, regression_data, small_model, weights

DATA = regression_data(26)


def train_compiled() -> dict[str, Any]:
    """Train compiled, uncompiled, and compiled from the middle; return how these compare."""
    # torch ignores it itself unless warnings are errors.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with shared_folder() as folder:
        whole = _train({"backend": backend}, folder / "whole")
        count = len(graphs)
        plain = _train(False, folder / "plain")
        resumed = _train({"backend": backend}, folder / "resumed", folder / "whole/update-000000002")
    return {
        "graphs": count,
        "difference": largest_difference(weights(whole), weights(plain)),
        "resumed": equal(weights(resumed), weights(whole)),
    }


class Blocks(nn.Module):
    """A model that repeats a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(self.drop(hidden))


def inductor() -> None:
    """Print how runs compiled by inductor compare with each other and with one without compilation."""
    from torch._inductor import config

    warnings.simplefilter("ignore")  # of torch, about this machine
    config.compile_threads = 1  # starts no processes that compile, each of which imports torch
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        options = {"options": {"fallback_random": True}}  # the random numbers of uncompiled code
        plain = _train(False, folder / "plain", model=Blocks())
        found = [_train(options, folder / name, model=Blocks()) for name in ("one", "two")]
        resumed = _train(options, folder / "three", folder / "one/update-000000002", model=Blocks())
    one, two, three = (weights(model) for model in (*found, resumed))
    difference = largest_difference(one, weights(plain))
    print(json.dumps({"repeated": equal(one, two), "resumed": equal(one, three), "difference": difference}))


def _train(
    compile_step: Any, folder: Path, resume_from: Path | None = None, model: nn.Module | None = None
) -> nn.Module:
    torch.compiler.reset()
    is_double = model is None
    model = small_model() if model is None else model
    data = DATA if is_double else TensorDataset(*(tensor.float() for tensor in DATA.tensors))
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=2, save_at_end=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [saving], seed=1, compile_step=compile_step)
    trainer.train(data, 2, per_device_batch_size=8 // world_size(), resume_from=resume_from)
    return trainer.model
