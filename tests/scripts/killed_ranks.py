"""A run whose ranks are killed, each once: torchrun --max-restarts 3 ... killed_ranks.py FOLDER."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from pytorch_accel_lite import TrainerCallback
from tests.scripts.resumable import run

folder = Path(sys.argv[1])


class Dies(TrainerCallback):
    """Rank 1 is killed at update 3, rank 0 at update 7: the first time that it comes there."""

    def on_train_step_checkpoint(self, trainer, **kwargs):
        update = trainer.progress.update
        mark = folder / f"killed{update}"
        if {3: "1", 7: "0"}.get(update) == os.environ["RANK"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
result = run(folder, extra=(Dies(),))
if result["main"]:
    torch.save(result, folder / "final.pt")
