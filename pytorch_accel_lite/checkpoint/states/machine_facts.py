"""The hardware and software on which the last bits of a run's results depend."""

from __future__ import annotations

from typing import Any

import torch

from pytorch_accel_lite.base.machine import deterministic_kernels, kernel_settings
from pytorch_accel_lite.base.types import JsonObject
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.step_division import numbers_of_shares


def machine_facts(trainer: TrainerLike) -> JsonObject:
    """Return the device, the versions and the settings with which a trainer computes, in JSON types."""
    device = trainer.device
    with trainer.division.computing(device), deterministic_kernels(trainer.deterministic):
        settings = kernel_settings(device.type == "cuda")
        threads = torch.get_num_threads()
    name = device.type
    versions: dict[str, object] = {}
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn
        name = torch.cuda.get_device_name(device)
        versions = {"CUDA": torch.version.cuda, "cuDNN": cudnn.version()}
    elif device.type == "cpu":
        versions = {"instructions": torch.backends.cpu.get_cpu_capability(), "threads": threads}
    return {"device": name, "torch": str(torch.__version__), **settings, **versions}


def describe_changes(trainer: TrainerLike, metadata: JsonObject) -> str:
    """Return what differs from the machine on which a state was saved, if that may change the run's last bits.

    The text is empty if nothing differs, or if the run differs anyway because the number of processes has changed.

    Args:
        metadata: the metadata in the manifest of the state
    """
    for name, count in numbers_of_shares(trainer.division).items():
        before = metadata.get(name)
        if count != before:
            return (
                f"The run was saved with {name}={before} and is resumed with {name}={count}: from now on it is not the "
                "same run to the last bit."
            )
    if not trainer.division.has_fixed_shares and metadata["world_size"] != trainer.ranks.world_size:
        return ""
    saved = metadata.get("machine", {})
    now = machine_facts(trainer)
    changes = [f"{name} {saved[name]} (now {now.get(name)})" for name in saved if saved[name] != now.get(name)]
    return f"The state was saved with {', '.join(changes)}: the last bits of the run may differ." if changes else ""
