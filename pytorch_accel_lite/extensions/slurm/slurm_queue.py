"""Requeueing a Slurm job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

from pytorch_accel_lite.extending import JobQueue, RunInterruptedError
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside

#: The signals with which Slurm warns a job (``sbatch --signal``). SIGTERM is not among them: ``scancel`` sends it, too.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_TIMEOUT = 60


class Slurm(JobQueue):
    """The queue of Slurm, to which a job returns when Slurm warns it that its time ends."""

    @property
    def job(self) -> str | None:
        """The name of this job for Slurm's commands; ``None`` outside of Slurm.

        A task of an array is named by array and task. Its job number will not do: the last task has the number of the
        array, which stands for all tasks.
        """
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")

    def check(self) -> None:
        """Check that this job could return to the queue; warn if torchrun would not pass on Slurm's warning.

        Raises:
            RuntimeError: if this is a job of Slurm on a machine without its commands
        """
        if self.job is None:
            return
        if shutil.which("scontrol") is None:
            raise RuntimeError(
                f"requeue=True needs Slurm's command scontrol, which is not on the PATH of {os.uname().nodename}, "
                "where the first process of this job runs. Add its directory to PATH, or pass requeue=False."
            )
        passed_on = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
        if "TORCHELASTIC_RUN_ID" in os.environ and not any(warning.name in passed_on for warning in WARNINGS):
            warn_outside(
                "requeue=True: Slurm's warning, SIGUSR1 or SIGUSR2, would end torchrun before a state is saved. Set "
                "PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 where the job starts torchrun; with torch "
                "older than 2.10, which does not know it, start one task per GPU with srun instead of torchrun."
            )

    def was_requeued(self) -> bool:
        """Whether this job has been in the queue before."""
        return self.job is not None and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"

    def requeue_after(self, interruption: Exception) -> str:
        """Return this job to the queue if a warning of Slurm has ended its run."""
        job = self.job
        if job is None or not isinstance(interruption, RunInterruptedError) or interruption.signum not in WARNINGS:
            return ""
        try:
            subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=_TIMEOUT)
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()
            return f"Job {job} could not be returned to Slurm's queue: {reason}"
        return f"Job {job} is back in Slurm's queue."
