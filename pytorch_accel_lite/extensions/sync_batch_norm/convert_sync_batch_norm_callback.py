"""Converting the batch norms of a model to ``SyncBatchNorm`` at the start of a run on several processes."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Convert batch norm to ``torch.nn.SyncBatchNorm``, in place, at the start of a run on several processes.

    Statistics are then computed over the batches of all processes, which matters when each process has few samples.
    Parameters and buffers remain the same objects, so the optimizer stays valid, and checkpoints fit either form. On
    the CPU, where torch cannot train ``SyncBatchNorm``, the model is left unchanged with a warning.

    Raises:
        ValueError: at the start of the run, for a subclass of batch norm with its own forward pass
    """

    def on_dataloaders_created(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.accelerator.num_processes == 1 or trainer.train_dataloader is None:  # None in evaluate()
            return
        if trainer.device.type in ("cpu", "mps"):
            if trainer.accelerator.is_main_process:
                warn_outside(
                    "ConvertSyncBatchNormCallback: torch cannot synchronise batch norm on "
                    f"{trainer.device.type!r}. The model is left unchanged: each process normalises with the "
                    "statistics of its own batches."
                )
            return
        trainer.model = synchronised(trainer.model)


def synchronised(model: nn.Module) -> nn.Module:
    """Replace the batch norms in a model, and return the model, or its replacement if it is itself a batch norm."""
    for module in model.modules():
        kind = type(module)
        if isinstance(module, _BatchNorm) and kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise ValueError(
                f"{kind.__name__} has its own forward pass, which SyncBatchNorm would ignore. Convert the model "
                "yourself before creating the optimizer; for timm models, use timm.layers.convert_sync_batchnorm."
            )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted
