"""Checks that all processes begin a run by the same call, with the same settings. They are collectives."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pytorch_accel_lite.base.arguments.constructor_calls import arguments_of
from pytorch_accel_lite.base.arguments.paths import is_place
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.data.sources import Source
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.lost_processes import naming_call
from pytorch_accel_lite.optimizers.optimizer_types import TrainerOptimizer
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import TrainerLike

#: Settings of a run that may differ between ranks and are not compared.
_OF_ONE_RANK = {"is_local_process_zero", "is_world_process_zero", "train_dl_kwargs", "eval_dl_kwargs"}
#: Arguments of callbacks that only name what they write.
_OUTPUT_NAMES = {"name", "project_name"}


def check_same_call(trainer: TrainerLike, call: str, train_data: Source, eval_data: Source) -> None:
    """Check that all ranks begin a run by the same call, with the same datasets, callbacks and seed.

    This is the first communication of a run: in any other, processes with different calls would deadlock.

    Args:
        call: the method of the trainer that begins the run
    """
    ranks = trainer.ranks
    settings: dict[str, object] = {
        "call": call,
        "callbacks": trainer.callback_handler.callback_list,
        "seed": trainer.seed,
    }
    settings |= _arguments_of_callbacks(trainer.callback_handler.callbacks)
    for name, data in (("train_dataset", train_data), ("eval_dataset", eval_data)):
        settings[name] = [*data] if isinstance(data, dict) else None if data is None else "a dataset"
    with naming_call(ranks, call):
        check_same_on_all_ranks(settings, ranks)


def check_same_on_all_ranks(settings: dict[str, object], ranks: Ranks) -> None:
    """Check that all ranks have the same settings. Otherwise, they would deadlock or read each other's samples."""
    by_rank = ranks.all_gather_object({name: value for name, value in settings.items() if name not in _OF_ONE_RANK})
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        for name in [*first, *(other.keys() - first.keys())]:
            if name.startswith("callbacks[") and not (name in first and name in other):
                continue  # only one rank has the object, such as a trial
            mine, theirs = (repr(values[name]) if name in values else "nothing" for values in (first, other))
            if mine != theirs and (name not in first or name not in other or first[name] != other[name]):
                raise ValueError(
                    f"{name}={theirs} on rank {rank}, but {name}={mine} on rank 0. Make the same calls on every "
                    "process, with the same arguments and callbacks: each derives its share of the run from them."
                )


def _arguments_of_callbacks(callbacks: Iterable[TrainerCallback]) -> dict[str, object]:
    """Return the arguments of this package's callbacks, which decide when processes communicate."""
    found: dict[str, object] = {}
    for number, callback in enumerate(callbacks):
        if is_from_this_package(type(callback)) and not callback.arguments_may_differ:
            for name, value in arguments_of(callback).items():
                if _is_comparable(value) and not (is_place(name) or name in _OUTPUT_NAMES):
                    found[f"callbacks[{number}].{name}"] = value
    return found


def settings_of_optimizer(optimizer: TrainerOptimizer) -> dict[str, object]:
    """Return the settings of an optimizer by group, for a comparison between processes."""
    found: dict[str, object] = {}
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for name, value in group.items():
            value = float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if _is_comparable(value):
                found[f"optimizer.param_groups[{number}][{name!r}]"] = value
    return found


def _is_comparable(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_comparable, value))
    return value is None or isinstance(value, (bool, int, float, str))
