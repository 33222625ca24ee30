"""Training through notebook_launcher, as in a cell of a notebook. python notebook.py FOLDER."""

from __future__ import annotations

import sys

import torch

from pytorch_accel_lite import notebook_launcher


def training(folder: str) -> None:
    from tests.small_models import adamw_trainer, float64_data, float64_model, weights

    torch.set_num_threads(1)
    model = float64_model()
    trainer = adamw_trainer(model)
    trainer.train(float64_data(30), 2, per_device_batch_size=3, train_dataloader_kwargs={"shuffle": False})
    result = {"weights": weights(model), "processes": trainer.accelerator.num_processes}
    torch.save(result, f"{folder}/rank{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    free = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}  # any port that is free
    notebook_launcher(training, (sys.argv[1],), num_processes=2, **free)
