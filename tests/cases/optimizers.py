"""Several optimizers that step together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import shared_folder, world_size
from tests.launching import some_of
from tests.tasks import regression_data, small_model, weights

DATA = regression_data(26)
SCHEDULES = {"rest": partial(LinearLR, end_factor=0.1, total_iters=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)}


def two_optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """One for weights, one for biases."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return {
        "matrix": torch.optim.SGD(matrices, lr=0.05, momentum=0.9),
        "rest": torch.optim.AdamW([{"params": rest[:1]}, {"params": rest[1:], "lr": 0.01}], lr=0.02),
    }


def train_with_two(folder: Path | None = None, epochs: int = 2, **kwargs: Any) -> Trainer:
    """Train with clipping, accumulation and a schedule for one of them."""
    model = small_model()
    states = SaveTrainingStateCallback(folder or "unused", save_every_n_steps=1, max_checkpoints=None)
    callbacks = [] if folder is None else [states]
    trainer = Trainer(model, nn.MSELoss(), two_optimizers(model), callbacks=callbacks, seed=0)
    trainer.train(
        DATA,
        epochs,
        per_device_batch_size=4 // world_size(),
        gradient_accumulation_steps=2,
        gradient_clip_norm=0.5,
        create_scheduler_fn=SCHEDULES,
        **kwargs,
    )
    return trainer


def trained_and_resumed() -> dict[str, Any]:
    """Return weights after a run, and after those that resumed some of its states."""
    with shared_folder() as folder:
        whole = weights(train_with_two(folder / "whole").get_model())
        states = some_of(state for state in sorted((folder / "whole").iterdir()) if state.is_dir())
        again = [train_with_two(folder / "again", resume_from=state) for state in states]
        resumed = [weights(trainer.get_model()) for trainer in again]
    return {"whole": whole, "resumed": resumed}
