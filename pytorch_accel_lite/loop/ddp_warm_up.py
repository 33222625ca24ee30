"""A pass before the first update of a resumed run, for ``DistributedDataParallel`` alone; losses outside of steps."""

from __future__ import annotations

import torch

from pytorch_accel_lite.base.modules.mixed_precision import mixed_precision
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.data.step_outputs import total_loss
from pytorch_accel_lite.loop.snapshot import leaving_no_trace
from pytorch_accel_lite.run.run import Run, TrainerLike


def loss_of(trainer: TrainerLike, batch: Batch) -> torch.Tensor:
    """Return only the loss of a batch, computed as in a training step."""
    trainer.current_run.batch = batch
    compute = trainer.compiled_forward or trainer.calculate_train_batch_loss
    with mixed_precision(trainer.accelerator):
        return total_loss(compute(batch.data)["loss"])


def warm_up_ddp(trainer: TrainerLike, run: Run, batch: Batch) -> None:
    """Run one forward and backward pass that changes nothing except ``DistributedDataParallel``.

    The wrapper rearranges gradients after its first backward pass. With three or more processes, the order of their
    sums, and so the last bits, depend on it: a resumed run must have had that first pass, too.
    """
    run.loop.must_warm_up_ddp = False
    with leaving_no_trace(trainer):
        trainer.backward_step(loss_of(trainer, batch))
