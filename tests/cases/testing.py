"""Tests of trained models by several processes."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite.callbacks import SaveBestModelCallback
from pytorch_accel_lite.experiment import run_tests
from tests.experiment_parts import Fragile, Net, ScaledTrainer

OPTIONS: dict[str, Any] = {"worst": 3, "skip_failed": True, "per_device_batch_size": 2, "shard_size": 2}


def run_in(folder: str, save_dir: str) -> list[dict[str, Any]]:
    """Test the best weights in a folder, with a sample that one rank cannot read."""
    os.chdir(folder)
    torch.manual_seed(0)
    data = Fragile(14, 5)
    trainer = ScaledTrainer(Net(), nn.MSELoss(), None, [SaveBestModelCallback()], seed=0)
    return run_tests(trainer, data, **OPTIONS, save_dir=save_dir)
