"""Checks that all processes begin a run by the same call, with the same settings, and hold the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import nn

from pytorch_accel_lite.base.arguments import arguments_of
from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.modules import normalised_weights, unwrap
from pytorch_accel_lite.base.nested_values import is_dense
from pytorch_accel_lite.base.paths import is_place
from pytorch_accel_lite.base.quantised_weights import all_plain_parts
from pytorch_accel_lite.base.sums_of_bits import sums_of_bits
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.data.sources import Source, is_named
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.lost_processes import naming_call
from pytorch_accel_lite.optimizers.optimizer_parts import TrainerOptimizer, TrainerScheduler, schedulers_in
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.trained_objects import all_optimized_parameters, other_modules, updated_parameters

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
        settings[name] = [*data] if is_named(data) else None if data is None else "a dataset"
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


def kinds_of_schedulers(scheduler: TrainerScheduler) -> dict[str, object]:
    """Return the names of the classes of a trainer's schedulers, for a comparison between processes."""
    parts = {} if scheduler is None else schedulers_in(scheduler)
    return {f"scheduler[{name!r}]" if name else "scheduler": type(part).__name__ for name, part in parts.items()}


def _is_comparable(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_comparable, value))
    return value is None or isinstance(value, (bool, int, float, str))


_MAX_NAMED = 4  # parameters named in a message
_ON_PURPOSE = "Pass check_replicas=False to the Trainer if the weights are supposed to differ."
_UNUSED = "Freeze the unused ones with requires_grad_(False), or pass find_unused_parameters=True to the Trainer."


def compare_replicas(trainer: TrainerLike) -> None:
    """Check that all processes hold the same weights, as ``Trainer.compare_replicas()`` describes."""
    prepared = trainer.prepared_model
    if trainer.ranks.world_size == 1 or (prepared is not None and prepared.outlives_runs):
        return
    names = _parameter_names(trainer)
    trained = _trained_parameters(trainer, names)
    parameters = trained | _frozen_parameters(trainer, trained)
    parts = {name: all_plain_parts(parameter) for name, parameter in parameters.items()}
    of_parts = iter(sums_of_bits(chain.from_iterable(parts.values())))
    sums = {name: sum(islice(of_parts, len(plain))) for name, plain in parts.items()}
    if len(set(trainer.ranks.all_gather_object(hash(tuple(sums.values()))))) == 1:
        return
    learning = [name for name, parameter in trained.items() if parameter.requires_grad]
    found = _Fingerprint(sums, learning, [names.get(id(p), "") for p in trainer.current_run.loop.without_gradient])
    by_rank = trainer.ranks.all_gather_object(found)
    for name in dict.fromkeys(chain.from_iterable(other.sums for other in by_rank)):
        differing = [str(r) for r, other in enumerate(by_rank) if other.sums.get(name) != by_rank[0].sums.get(name)]
        if differing:
            kind = "train" if any(name in other.trained for other in by_rank) else "have"
            raise RuntimeError(
                f"The processes no longer {kind} the same weights: {name!r} differs on rank {', '.join(differing)} "
                f"from rank 0. {_likely_cause(trainer, name, by_rank)}"
            )


class _Fingerprint(NamedTuple):
    """The weights and gradients of a process, for comparison.

    Args:
        sums: a checksum of each parameter
        trained: the names of the trained parameters
        without_gradient: the names of the trained parameters that had no gradient in the first update
    """

    sums: dict[str, int]
    trained: list[str]
    without_gradient: list[str]


def note_missing_gradients(trainer: TrainerLike, run: Run) -> None:
    """Note which trained parameters have no gradient in the current update."""
    run.loop.without_gradient = [p for p in updated_parameters(trainer) if p.requires_grad and p.grad is None]


def _likely_cause(trainer: TrainerLike, name: str, by_rank: list[_Fingerprint]) -> str:
    prepared = trainer.prepared_model
    names = _parameter_names(trainer)
    modules = (unwrap(trainer.model), *other_modules(trainer).values())
    if name in [names.get(id(weight)) for weight in normalised_weights(modules)]:
        return (
            "It is an embedding with max_norm: each forward pass normalises only the rows that its process looks up. "
            "Leave out max_norm, and normalise all rows in an overridden optimizer_step, after super().optimizer_step()"
            f": weight.data.renorm_(2, 0, maxnorm=1.0). {_ON_PURPOSE}"
        )
    if not any(name in found.trained for found in by_rank):
        return (
            "It is frozen (requires_grad=False), so nothing averages it, but something changes it on each process by "
            "itself, such as forward(). Let all change it alike, by values from trainer.gather(), or register it as a "
            f"buffer, which is copied from rank 0 before each forward pass. {_ON_PURPOSE}"
        )
    if trainer.current_run.window.is_guarded:  # such steps call the bare module, and average all gradients themselves
        return (
            "With auto_microbatch or SkipFailedBatchesCallback, all gradients are averaged, so something else changes "
            "it on each process by itself, such as a callback or an optimizer that draws random numbers. Let all "
            f"change it alike, by values from trainer.gather(). {_ON_PURPOSE}"
        )
    bypasses = "bypasses the averaging of gradients. Call self.model(...) in your step methods."
    if prepared is not None and not prepared.has_run:
        return f"trainer.model was never called in this run: a step that calls the bare module {bypasses} {_ON_PURPOSE}"
    unused = {rank: found.without_gradient for rank, found in enumerate(by_rank) if found.without_gradient}
    if unused:
        of_ranks = (f"{listed(map(repr, of_rank), _MAX_NAMED)} on rank {rank}" for rank, of_rank in unused.items())
        return (
            f"In the first update, the loss did not depend on these parameters: {'; '.join(of_ranks)}. torch averages "
            f"no gradients until each parameter has one. {_UNUSED} {_ON_PURPOSE}"
        )
    return (
        "Likely causes: a step that calls the bare module or a part of it, or parameters that were unfrozen during the "
        f"run without rewrap_model(): each of these {bypasses} To average the gradients of a module that is trained "
        "besides the model, call self.accelerator.prepare(module). If the model draws weights in its first forward "
        f"pass, call it once before the run, after torch.manual_seed. {_ON_PURPOSE}"
    )


def _parameter_names(trainer: TrainerLike) -> dict[int, str]:
    """Return the names of the parameters in the trainer's modules, by their ids."""
    names: dict[int, str] = {}
    for prefix, module in {"": unwrap(trainer.model), **other_modules(trainer)}.items():
        for name, parameter in module.named_parameters(prefix):
            names.setdefault(id(parameter), name)
    return names


def _trained_parameters(trainer: TrainerLike, names: dict[int, str]) -> dict[str, nn.Parameter]:
    """Return the parameters that the trainer's optimizers update, by their names in the trainer's modules."""
    trained = [*updated_parameters(trainer), *all_optimized_parameters(trainer)]
    by_id = {id(parameter): parameter for parameter in trained if not hasattr(parameter, "device_mesh")}
    return {names.get(key, f"parameter {number}"): value for number, (key, value) in enumerate(by_id.items())}


def _frozen_parameters(trainer: TrainerLike, trained: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the parameters of the model that are not trained, and whose bits can be read."""
    others = {name: p.detach() for name, p in unwrap(trainer.model).named_parameters() if name not in trained}
    return {name: data for name, data in others.items() if type(data) is torch.Tensor and is_dense(data)}
