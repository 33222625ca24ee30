"""A run that can be killed: python -m tests.gpu.resumable KIND FOLDER [UPDATE]

Its data are augmented by workers and pinned; KIND is ``fp16``, with a scale of gradients that changes, or ``compiled``.
It kills itself by SIGKILL after the number of updates; without one, it writes what it ended with to FOLDER/final.pt.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback, TerminateOnNaNCallback
from tests.gpu.parts import COMPILED, IMAGES, ON_GPU, Task, adamw, image_data, in_precision
from tests.small_models import listener

UPDATES = 8  # in each of two epochs
DIES_AFTER = 11  # in the second, two updates after a state


class Augmented(Dataset[Any]):
    """Images with noise by all generators."""

    def __init__(self, batches: int) -> None:
        self.images, self.labels = image_data(batches).tensors

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(3, 1, 1) + 0.1 * np.random.randn() + 0.1 * random.random()
        return self.images[index] + noise.float(), self.labels[index]


def main(kind: str, folder: Path, dies_after: int | None) -> None:
    if not ON_GPU:
        torch.set_num_threads(1)
    task = Task("resnet")
    model = nn.Sequential(task.model(), nn.Dropout(0.2))

    def die(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=3, asynchronous=True, max_checkpoints=None)
    precision = {"fp16": "fp16", "compiled": "bf16"}[kind]
    trainer = Trainer(
        model,
        task.loss,
        adamw(model),
        [TerminateOnNaNCallback, saving, listener(on_train_step_end=die)],
        seed=5,
        deterministic=True,
        compile_step=(COMPILED or True) if kind == "compiled" else False,
        **in_precision(precision),
    )
    trainer.train(
        Augmented(UPDATES),
        2,
        per_device_batch_size=IMAGES,
        gradient_clip_norm=1.0,
        create_scheduler_fn="cosine",
        train_dataloader_kwargs={"num_workers": 2, "pin_memory": ON_GPU},
        resume_from="latest",
    )
    scales = trainer.accelerator.scaler
    found = {
        "weights": {name: value.cpu() for name, value in model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict()["state"],
        "scale": None if scales is None else scales.state_dict(),
        "history": trainer.run_history.to_dict(),
        "random": (torch.rand(2), np.random.rand(), random.random()),
    }
    torch.save(found, folder / "unfinished.pt")
    (folder / "unfinished.pt").rename(folder / "final.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
