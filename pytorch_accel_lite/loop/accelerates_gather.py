"""Users' calls of Accelerate's ``gather_for_metrics`` in a run, where batches may differ in length or be lacking.

``trainer.gather()`` is in ``trainer_methods/gather_and_broadcast.py``; predictions are gathered in ``prediction.py``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from itertools import chain

import torch

from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.distributed.accelerator import replacing_method
from pytorch_accel_lite.run.run import TrainerLike


def gathering_uneven_batches(trainer: TrainerLike) -> AbstractContextManager[None]:
    """Within a block, replace Accelerate's ``gather_for_metrics`` by a version for batches of different lengths."""
    return replacing_method(trainer.accelerator, "gather_for_metrics", partial(_gather_for_metrics, trainer))


def _gather_for_metrics(trainer: TrainerLike, input_data: Tree, use_gather_object: bool = False) -> Tree:
    """Replace Accelerate's method: return tensors concatenated over all processes, or a list of other objects.

    In a step, rows of filler batches are left out. After the first call, evaluations have filler batches as well, so
    that a process without samples in the last step also takes part.
    """
    run, batch = trainer.current_run, trainer.current_run.batch
    if batch is not None and not run.data.has_fillers:
        _check_all_have_batches(trainer, batch)
        run.data.has_fillers = True
    is_filler = batch is not None and batch.is_filler
    leaves, structure = torch.utils._pytree.tree_flatten(input_data)
    if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return list(chain.from_iterable(trainer.data_ranks.all_gather_object([] if is_filler else input_data)))
    rows = [(leaf if leaf.ndim else leaf[None])[: 0 if is_filler else None].detach() for leaf in leaves]
    return trainer.gather(torch.utils._pytree.tree_unflatten(rows, structure))


def _check_all_have_batches(trainer: TrainerLike, batch: Batch) -> None:
    """Raise an error if some processes certainly have no batch in the first step of an evaluation."""
    ranks, total = trainer.data_ranks, batch.total_samples
    is_short = total is not None and (total < ranks.world_size or total == batch.num_samples)
    if trainer.division.has_fixed_shares or is_short:
        uneven = f"{trainer.division.argument} divide them unevenly"
        reason = f"the first step has {total} samples in all" if is_short else uneven
        raise RuntimeError(
            f"accelerator.gather_for_metrics() waits for all processes in each step of an evaluation, but some have no "
            f"batch: {reason}. Keep the values of each process, and call trainer.gather() once, in on_eval_epoch_end."
        )
