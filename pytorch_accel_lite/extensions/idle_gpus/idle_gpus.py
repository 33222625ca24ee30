"""Asking ``nvidia-smi`` which GPUs are idle, and making only those visible."""

from __future__ import annotations

import os
import subprocess
from typing import NamedTuple

import torch

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.used,utilization.gpu,name", "--format=csv,noheader,nounits")


class _Gpu(NamedTuple):
    number: str
    uuid: str
    used_mib: float
    busy_percent: float
    name: str


def use_idle_gpus(count: int = 1, max_used_mib: float = 500) -> list[str]:
    """Make only idle GPUs visible to this process: the GPUs with the least memory in use and, if equal, the least busy.

    Call it before anything uses a GPU, and in a single process: it sets ``CUDA_VISIBLE_DEVICES``, which child processes
    inherit. Two people who call it at the same moment may choose the same GPU.

    Args:
        count: number of GPUs
        max_used_mib: memory in use, in MiB, above which a GPU is not idle

    Returns:
        the identifiers of the GPUs, as in ``CUDA_VISIBLE_DEVICES``. If that is already set, only its GPUs are
        considered.

    Raises:
        RuntimeError: if fewer GPUs are idle, with the memory in use on each; if it is too late to choose; in one of
            several processes; if ``CUDA_VISIBLE_DEVICES`` numbers GPUs of several kinds, without
            ``CUDA_DEVICE_ORDER=PCI_BUS_ID``
    """
    check_positive_int("count", count)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "use_idle_gpus() was called in one of several processes, which would all choose the same GPUs. Set "
            f"{_VISIBLE} before the launch."
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("use_idle_gpus() was called after a GPU was used. Call it first, right after the imports.")
    gpus = sorted(_visible_gpus(), key=lambda gpu: (gpu.used_mib, gpu.busy_percent))
    idle = [gpu.uuid for gpu in gpus if gpu.used_mib <= max_used_mib][:count]
    if len(idle) < count:
        used = "; ".join(f"GPU {gpu.number}: {gpu.used_mib:.0f} MiB, {gpu.busy_percent:.0f} % busy" for gpu in gpus)
        raise RuntimeError(
            f"count={count}, but {len(idle)} of {len(gpus)} GPUs have at most max_used_mib={max_used_mib} MiB in use "
            f"({used or 'there is none'})."
        )
    os.environ[_VISIBLE] = ",".join(idle)
    return idle


def _visible_gpus() -> list[_Gpu]:
    """Return the GPUs of this machine that the environment allows."""
    try:
        printed = subprocess.run(_QUERY, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"use_idle_gpus() asks nvidia-smi for the GPUs, which failed: {error}") from error
    gpus = [_parse(line) for line in printed.splitlines() if line.strip()]
    allowed = os.environ.get(_VISIBLE)
    if allowed is None:
        return gpus
    names = [name.strip() for name in allowed.split(",")]
    if any(name.isdigit() for name in names):
        _check_numbers(gpus, allowed)
    found: list[_Gpu] = []
    for name in names:  # as CUDA does, up to the first that is not the name of a single GPU
        matching = [gpu for gpu in gpus if name and (name == gpu.number or gpu.uuid.startswith(name))]
        if len(matching) != 1:
            break
        found += matching
    return list(dict.fromkeys(found))


def _check_numbers(gpus: list[_Gpu], allowed: str) -> None:
    """Check that CUDA numbers the GPUs as ``nvidia-smi`` does: without this order it begins with the fastest."""
    if len({gpu.name for gpu in gpus}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise RuntimeError(
            f"{_VISIBLE}={allowed} has numbers, but CUDA may count the GPUs of this machine, which are of several "
            "kinds, in another order than nvidia-smi. Set CUDA_DEVICE_ORDER=PCI_BUS_ID if these are nvidia-smi's "
            f"numbers, or set {_VISIBLE} to the UUIDs that 'nvidia-smi -L' prints."
        )


def _parse(line: str) -> _Gpu:
    number, uuid, *figures, name = (part.strip() for part in line.split(",", 4))
    used, busy = (float(figure) if figure.replace(".", "").isdigit() else 0.0 for figure in figures)  # or "[N/A]"
    return _Gpu(number, uuid, used, busy, name)
