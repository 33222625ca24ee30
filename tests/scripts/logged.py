"""A run with every logger, which may be killed at any time; run again, it resumes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from pytorch_accel_lite import TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback, StepBasedEvaluationCallback
from tests.scripts.resumable import Lingers
from tests.small_models import adamw_trainer, float64_data, float64_model

EPOCHS, UPDATES = 3, 12


class Slow(TrainerCallback):
    def __init__(self, delay: float) -> None:
        self.delay = delay

    def on_train_step_end(self, trainer, **kwargs):
        time.sleep(self.delay)


def loggers(folder: Path, mlflow: bool = True) -> list[Any]:
    board = folder / "tensorboard"
    trackers = [callbacks.TrackerCallback("tensorboard", "run", board, every_n_updates=2, config={"mine": 3})]
    if mlflow:
        trackers.append(callbacks.TrackerCallback("mlflow", every_n_updates=1))
    files = [
        callbacks.MetricsFileCallback(folder / "metrics.jsonl", 1),
        callbacks.MetricsFileCallback(folder / "metrics.csv", 3),
    ]
    return [*files, *trackers, callbacks.RunLogCallback(folder / "log", {"mine": 3})]


def run(
    folder: Path, saver_first: bool = False, delay: float = 0.0, mlflow: bool = True, is_to_end: bool = True
) -> Any:
    """Run, or stay in the last update until the process is killed."""
    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1)
    monitors: list[Any] = [callbacks.LearningRateMonitorCallback(), callbacks.GradientNormCallback()]
    slow = Slow(delay), Lingers(None if is_to_end else UPDATES)
    monitors.append(
        callbacks.ShowOutputsCallback(lambda model: {"a weight": model[0].weight[0, 0].item()}, "3 updates", show=False)
    )
    others = [*slow, *monitors, *loggers(folder, mlflow), StepBasedEvaluationCallback(2)]
    both = [saving, *others] if saver_first else [*others, saving]
    trainer = adamw_trainer(float64_model(), callbacks=both, seed=2)
    data = float64_data(24)
    trainer.train(data, EPOCHS, data, per_device_batch_size=6 // trainer.ranks.world_size, resume_from="latest")
    return trainer


def run_with_mlflow(folder: Path, saver_first: bool = False, delay: float = 0.0, is_to_end: bool = True) -> int:
    """Run with all loggers; return the number of processes."""
    import mlflow

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow.set_tracking_uri((folder / "mlruns").as_uri())
    return run(folder, saver_first, delay, is_to_end=is_to_end).ranks.world_size
