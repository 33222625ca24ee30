"""A run with all callbacks that go together, which kills itself once: torchrun ... all_callbacks.py FOLDER UPDATE."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torchmetrics import MeanAbsoluteError

from pytorch_accel_lite import TrainerCallback, callbacks, get_default_callbacks
from pytorch_accel_lite.callbacks import StepBasedEvaluationCallback, TimeLimitCallback
from tests.scripts.resumable import run


class Dies(TrainerCallback):
    """Kills the whole job at an update, once."""

    def __init__(self, folder: Path, update: int) -> None:
        self.folder, self.update = folder, update

    def on_train_step_end(self, trainer, **kwargs):
        if trainer.progress.update == self.update and not (self.folder / "killed").exists():
            trainer.barrier()
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def metrics(train: bool = False) -> TrainerCallback:
    from pytorch_accel_lite.callbacks import MetricsCallback

    return MetricsCallback(
        {"mae": MeanAbsoluteError()}, lambda batch, output: (output["model_outputs"], batch[1]), train=train
    )


def run_with_all(folder: Path, update: int = 0) -> dict[str, Any]:
    """Run with a kill at an update, and return what the run ended with."""
    from pytorch_accel_lite.callbacks import ProgressBarCallback

    extra = (
        *(callback() for callback in get_default_callbacks(progress_bar=False)),
        ProgressBarCallback(show_always=True),
        metrics(train=True),
        StepBasedEvaluationCallback(2),
        callbacks.ModelEmaCallback(0.9, save_path=folder / "ema.pt", callbacks=[metrics()], warmup=True),
        callbacks.GradualUnfreezingCallback(),
        callbacks.LimitBatchesCallback(3),
        callbacks.LimitEvalStepsCallback(2),
        callbacks.SkipFailedBatchesCallback(),
        callbacks.GradientSpikeCallback(warm_up_updates=2),
        callbacks.NaNReportCallback(folder / "reports"),
        TimeLimitCallback(3600),
        Dies(folder, update),
    )
    result = run(folder, extra=extra, schedule=False)
    result["ema"] = torch.load(folder / "ema.pt", weights_only=True)["model_state_dict"]
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_with_all(Path(sys.argv[1]), int(sys.argv[2]))
