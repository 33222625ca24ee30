"""A warning of Slurm that one process gets."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import rank, shared_folder, world_size
from tests.tasks import quiet_trainer, regression_data, small_model


class SendsSignals(TrainerCallback):
    """Sends signals to this process after an update, if it is on the last rank."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.numbers = numbers

    def on_train_step_end(self, trainer, **kwargs):
        if trainer.progress.update == 2 and rank() == world_size() - 1:
            for number in self.numbers:
                os.kill(os.getpid(), number)


def install_scontrol(folder: Path, code: int = 0) -> Path:
    """Put a stand-in for Slurm's command first on the PATH; it writes what it is called with to a file."""
    calls, program = folder / "calls", folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho "slurm_update error: Access denied" >&2\nexit {code}\n')
    program.chmod(0o755)
    os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    return calls


def warned_on_the_last_rank() -> tuple[str, list[str]]:
    """What Slurm was asked, and the states that are there."""
    with shared_folder() as folder:
        if rank() == 0:
            install_scontrol(folder)
        os.environ |= {"SLURM_JOB_ID": "17", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1"}
        os.environ.pop("SLURM_ARRAY_JOB_ID", None)
        saving = SaveTrainingStateCallback(folder / "states", requeue=True)
        trainer = quiet_trainer(small_model(), callbacks=[SendsSignals(signal.SIGUSR1), saving])
        with suppress(SystemExit):
            trainer.train(regression_data(400), 1, per_device_batch_size=2)
        trainer.barrier()
        return (folder / "calls").read_text(), [path.name for path in (folder / "states").glob("update-*")]
