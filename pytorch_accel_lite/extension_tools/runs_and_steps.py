"""The parts of a run, for trials and other runs within a run."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TypeGuard

import numpy as np
import torch

from pytorch_accel_lite.base.modules.sharded_weights import tensor_parallel_size
from pytorch_accel_lite.loop.fit import prepare_training
from pytorch_accel_lite.loop.guards.batch_norm import min_share_for_batch_norm
from pytorch_accel_lite.loop.guards.dataset_checks import check_dataset
from pytorch_accel_lite.loop.guards.trainer_arguments import check_training
from pytorch_accel_lite.loop.inference import inference, inference_run, unwrapped_model
from pytorch_accel_lite.loop.lifecycle import entering
from pytorch_accel_lite.loop.model_setup import prepare_model, release_model
from pytorch_accel_lite.loop.run_loaders import create_eval_loaders, create_train_loader
from pytorch_accel_lite.loop.scheduler_creation import create_from_options
from pytorch_accel_lite.loop.snapshot import Snapshot, replaced
from pytorch_accel_lite.loop.training import loss_of, run_step
from pytorch_accel_lite.run.error_notes_seam import add_error_notes, adding_error_notes
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.run_data import DataArguments
from pytorch_accel_lite.run.scheduler_stepping import step_after_update
from pytorch_accel_lite.steps.step_choice import create_step

__all__ = [
    "DataArguments", "add_error_notes", "adding_error_notes", "check_dataset", "check_training", "create_eval_loaders",
    "create_from_options", "create_step", "create_train_loader", "entering", "inference", "inference_run",
    "is_stepped_after_updates", "loss_of", "min_share_for_batch_norm", "prepare_model", "prepare_training",
    "preserving_attributes", "release_model", "replaced", "run_step", "step_after_update", "tensor_parallel_size",
    "unwrapped_model",
]  # fmt: skip

_MOST_ELEMENTS = 64  # of a container whose elements are kept, too


@contextmanager
def preserving_attributes(*owners: object) -> Iterator[None]:
    """Restore all attributes of objects after a block.

    This includes the contents of lists, dicts, sets and deques, of tensors and arrays, also in short lists and dicts,
    and the states of random generators.
    """
    with Snapshot() as before:
        before.keep_generators_of(owners)
        for owner in owners:
            held = dict(vars(owner))
            before.callback(vars(owner).update, held)
            before.callback(vars(owner).clear)
            for part in chain.from_iterable(map(_with_parts, held.values())):
                if _is_plain_tensor(part):
                    before.keep_tensors([part])
                elif type(part) is np.ndarray and part.flags.writeable:
                    before.callback(np.copyto, part, part.copy())
            for value in held.values():
                if isinstance(value, (list, dict, set, deque)):
                    add = value.update if isinstance(value, (dict, set)) else value.extend
                    before.callback(add, copy.copy(value))
                    before.callback(value.clear)
        yield


def _with_parts(value: object) -> Iterable[object]:
    """Return a value and the elements of a short container. The elements of long ones are hardly changed in place."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return chain([value], parts if len(parts) <= _MOST_ELEMENTS else ())


def _is_plain_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor that a step may change in place, and no result that still has its graph."""
    return type(value) is torch.Tensor and value.layout is torch.strided and value.grad_fn is None and not value.is_meta


def is_stepped_after_updates(trainer: TrainerLike) -> bool:
    """Whether the scheduler is stepped after each update that is not skipped."""
    return trainer.scheduler is not None and trainer.current_run.request.scheduler_interval == "update"
