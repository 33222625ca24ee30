"""Advice for trainings that wait for data."""

from __future__ import annotations

from pytorch_accel_lite.base.cores import cores_per_process
from pytorch_accel_lite.run.run import TrainerLike


def faster_data(trainer: TrainerLike) -> str:
    """Return advice, for the cores of this machine, on how to feed a model that waits for data."""
    workers = getattr(trainer.train_dataloader, "num_workers", 0)
    cores = cores_per_process(trainer.accelerator.num_processes)
    if workers < cores:
        more = "more workers" if workers else "workers"
        count = min(cores, max(8, 2 * workers))
        advice = f"Use {more}, num_workers={count} in train_dataloader_kwargs or in your DataLoader, or precompute"
    else:
        advice = f"{workers} workers already share {cores} core{'s' * (cores > 1)}; more would not help. Precompute"
    return (
        f"{advice} what the dataset does for each sample. Data that fits in memory can be a TensorDataset, which is "
        "read a batch at a time."
    )
