"""Batch norm over the batches of all processes."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.protocols import TrainerLike


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Convert batch norm to ``torch.nn.SyncBatchNorm``, in place, at the start of a run on several processes.

    Statistics are then computed over the batches of all processes, which matters when each process has few samples.
    Parameters and buffers remain the same objects, so the optimizer stays valid, and checkpoints fit either form. On
    the CPU, where torch cannot train ``SyncBatchNorm``, the model is left unchanged with a warning.

    :raises ValueError: at the start of the run, for a subclass of batch norm with its own forward pass
    """

    def on_dataloaders_created(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if trainer.accelerator.num_processes == 1 or trainer.train_dataloader is None:  # None: evaluate()
            return
        if trainer.device.type in ("cpu", "mps"):
            if trainer.accelerator.is_main_process:
                warnings.warn(
                    "ConvertSyncBatchNormCallback: torch cannot synchronise batch norm on "
                    f"{trainer.device.type!r}. The model is left unchanged: each process normalises with the "
                    "statistics of its own batches.",
                    stacklevel=2,
                )
            return
        trainer.model = synchronised(trainer.model)


def synchronised(model: nn.Module) -> nn.Module:
    """Replace the batch norms within a model, and return it; if the model itself is one, return its replacement.

    An existing ``SyncBatchNorm``, which may have its own process group, is left unchanged.
    """
    replaced: dict[nn.Module, nn.Module] = {}  # a module that is used twice stays one
    for norm in model.modules():
        if isinstance(norm, _BatchNorm) and not isinstance(norm, nn.SyncBatchNorm):
            replaced[norm] = _synchronised_norm(norm)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if child in replaced:
                setattr(module, name, replaced[child])
    return replaced.get(model, model)


def _synchronised_norm(norm: _BatchNorm) -> nn.Module:
    kind = type(norm)
    if kind.forward is not _BatchNorm.forward:
        raise ValueError(
            f"{kind.__name__} has its own forward pass, which SyncBatchNorm would ignore. Convert the model yourself "
            "before creating the optimizer; for timm models, use timm.layers.convert_sync_batchnorm."
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(norm)  # type: ignore[no-untyped-call]
    for name, value in vars(norm).items():  # its hooks
        if name.endswith("_hooks") or "_hooks_" in name:
            vars(converted)[name] = value
    return converted
