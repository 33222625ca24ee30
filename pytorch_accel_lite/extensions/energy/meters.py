"""Counters of energy: of the processors of a machine, and of a GPU. Each returns joules since its last reading."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

#: Returns the joules since the last call.
Meter = Callable[[], float]


class RaplMeter:
    """An energy counter of Intel or AMD processors, which Linux shows as a folder.

    Args:
        folder: a folder in /sys/class/powercap, for a processor package or its memory
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._path.read_text())

    def __call__(self) -> float:
        """Return the joules since the last call. The counter wraps around to 0 after a while."""
        last, self._last = self._last, int(self._path.read_text())
        return ((self._last - last) % (self._range + 1)) / 1e6


class NvmlMeter:
    """The energy counter of a GPU, read from its driver.

    Args:
        device: the GPU of this process
    """

    def __init__(self, device: torch.device) -> None:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._read: Callable[[], int] = lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))  # in mJ
        self._last = self._read()

    def __call__(self) -> float:
        """Return the joules since the last call."""
        last, self._last = self._last, self._read()
        return (self._last - last) / 1e3


def find_meters(device: torch.device, powercap: Path | None) -> dict[str, list[Meter]]:
    """Return the counters that can be read, by the kind of hardware.

    Args:
        powercap: the folder of the processors' counters; ``None`` on processes that leave these counters to another
            process
    """
    meters: dict[str, list[Meter]] = {"processors": _processor_meters(powercap), "GPUs": []}
    if device.type == "cuda":
        with suppress(Exception):  # no package, driver or counter: the errors differ
            meters["GPUs"].append(NvmlMeter(device))
    return {kind: found for kind, found in meters.items() if found}


def _processor_meters(powercap: Path | None) -> list[Meter]:
    """Return the counters of processor packages and of memory.

    Some processors show a counter twice, by the driver ``intel-rapl-mmio``, too. Several have a "dram" each.
    """
    meters: list[Meter] = []
    names: set[str] = set()
    folders = powercap.glob("*:*") if powercap is not None else ()
    for folder in sorted(folders, key=lambda folder: (_is_second(folder), folder)):
        try:
            name = (folder / "name").read_text().strip()
            if name.startswith(("package", "dram")) and not (_is_second(folder) and name in names):
                meters.append(RaplMeter(folder))
                names.add(name)
        except (OSError, ValueError):  # often only root may read a counter
            continue
    return meters


def _is_second(folder: Path) -> bool:
    return folder.name.startswith("intel-rapl-mmio")
