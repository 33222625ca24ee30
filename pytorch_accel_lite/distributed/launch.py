"""Checks of what a launcher has started, and ending when it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings

from accelerate import Accelerator
from accelerate.utils import DistributedType

_PR_SET_PDEATHSIG = 1


def check_launch(accelerator: Accelerator) -> None:
    """Raise an error when the accelerator does not see all that a launcher started, or would ignore an FSDP plugin."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise RuntimeError(
            f"The launcher started WORLD_SIZE={launched} processes, but Accelerate sees "
            f"{accelerator.num_processes}: each rank would train on its own. On machines without a GPU set the "
            "environment variable ACCELERATE_USE_CPU=true, or pass accelerator=Accelerator(cpu=True) to the Trainer."
        )
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and accelerator.is_main_process:
        warnings.warn(
            f"torchrun may restart this job {restarts} time(s), but lets all attempts share one store, where restarted "
            "processes find the addresses of dead ones and fail or hang. Start it with the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.",
            stacklevel=4,
        )
    wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    if wants_fsdp and accelerator.distributed_type != DistributedType.FSDP:
        raise RuntimeError(
            f"An FSDP plugin was configured, but Accelerate runs {accelerator.distributed_type.value} on "
            f"{accelerator.num_processes} {accelerator.device.type} process(es) and would ignore it. Start several "
            "processes with accelerate launch on a machine with GPUs, or leave the plugin out."
        )


def die_with_launcher() -> None:
    """Under torchrun, let the system kill this process when its launcher is killed. Linux only."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)
