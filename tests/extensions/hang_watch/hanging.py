"""A run that hangs once, in the callback of a rank: torchrun --max-restarts 1 ... hanging.py FOLDER."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.callbacks import HangWatchCallback
from tests.scripts.resumable import run_to_the_end

folder = Path(sys.argv[1])


class Hangs(TrainerCallback):
    def on_train_step_end(self, trainer, **kwargs):
        mark = folder / "hung"
        if trainer.progress.update == 6 and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            time.sleep(300)


torch.set_num_threads(1)
run_to_the_end(folder, extra=(Hangs(), HangWatchCallback(3, end=True)))
