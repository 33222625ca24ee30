"""An experiment file, and commands with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.experiment import Experiment
from pytorch_accel_lite.extensions.experiment.command_line import main

FILE = """
model:
  class_path: tests.extensions.experiment.parts.Net
  init_args:
    width: 5
loss_func: MSELoss
optimizer:
  class_path: AdamW
  init_args:
    lr: 1e-2
data:
  train: tests.extensions.experiment.parts.load_data
  eval:
    class_path: tests.extensions.experiment.parts.load_data
    init_args: {size: 8}
trainer: {seed: 3}
train:
  num_epochs: 2
  per_device_batch_size: 8
"""
SCHEDULE = """
scheduler:
  class_path: OneCycleLR
  init_args:
    max_lr: 0.01
    total_steps: NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH
"""
STATES = ["--callbacks+", "SaveTrainingStateCallback", "--callbacks.save_every_n_steps", "1"]


def read(path: Path, *arguments: str) -> Experiment:
    return Experiment.from_file(path, arguments)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.get_model().state_dict()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def run(*arguments: str, capsys: Any) -> tuple[int, str, str]:
    try:
        code = main([*map(str, arguments)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()
