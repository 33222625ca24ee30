"""The peak memory use of an epoch."""

from __future__ import annotations

import sys

import torch

from pytorch_accel_lite.extending import RunRequest, TrainerCallback, TrainerLike

_MIB = 2**20


class DeviceMemoryCallback(TrainerCallback):
    """Record the peak memory use of any process, in MiB.

    On a GPU: ``memory_allocated_mib`` and ``memory_reserved_mib``, the peaks of the epoch. Elsewhere:
    ``memory_resident_mib``, the peak resident size since the process started.
    """

    affects_training = False

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        request.metrics.record(self, [f"memory_{kind}_mib" for kind in ("allocated", "reserved", "resident")])

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        memory = getattr(torch, trainer.device.type, None)
        if memory is not None and hasattr(memory, "reset_peak_memory_stats"):
            memory.reset_peak_memory_stats(trainer.device)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        memory = getattr(torch, trainer.device.type, None)
        if memory is not None and hasattr(memory, "reset_peak_memory_stats"):
            used = {
                "memory_allocated_mib": memory.max_memory_allocated(trainer.device) / _MIB,
                "memory_reserved_mib": memory.max_memory_reserved(trainer.device) / _MIB,
            }
        else:
            import resource  # POSIX only

            kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
            used = {"memory_resident_mib": kibibytes / (1024 if sys.platform != "darwin" else _MIB)}
        for name, largest in zip(used, trainer.ranks.max(list(used.values())), strict=True):
            trainer.run_history.update_metric(name, largest)
