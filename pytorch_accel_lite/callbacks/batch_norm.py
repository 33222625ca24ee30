"""Batch norm over the batches of all processes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pytorch_accel_lite.events import TrainerCallback

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Turns batch norm into ``torch.nn.SyncBatchNorm``, in place, at the start of a run on several processes.

    Its statistics are then those of the batches of all processes together, which matters where a process has few
    samples. Parameters and buffers stay the same objects, so the optimizer need not be made again, and checkpoints fit
    either form. On the CPU, where torch cannot train ``SyncBatchNorm``, it warns and leaves the model as it is.

    :raises ValueError: at the start of the run, for a class derived from batch norm with a forward pass of its own
    """

    def on_dataloaders_created(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.accelerator.num_processes == 1 or trainer.train_dataloader is None:  # None: evaluate()
            return
        if trainer.device.type in ("cpu", "mps"):
            if trainer.accelerator.is_main_process:
                warnings.warn(
                    "ConvertSyncBatchNormCallback: torch cannot synchronise batch norm on "
                    f"{trainer.device.type!r}. The model is left as it is: each process normalises with the statistics "
                    "of its own batches.",
                    stacklevel=2,
                )
            return
        trainer.model = synchronised(trainer.model)


def synchronised(model: nn.Module) -> nn.Module:
    """Replace the batch norms within a model, and return it; of a model that is one itself, return the replacement.

    What is a ``SyncBatchNorm`` already, with a process group of its own perhaps, is left alone.
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
            f"{kind.__name__} has a forward pass of its own, which SyncBatchNorm would not do. Convert such a model "
            "yourself before the optimizer is made, those of timm with timm.layers.convert_sync_batchnorm."
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(norm)  # type: ignore[no-untyped-call]
    for name, value in vars(norm).items():  # its hooks
        if name.endswith("_hooks") or "_hooks_" in name:
            vars(converted)[name] = value
    return converted
