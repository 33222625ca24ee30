"""Checking that all processes hold the same weights: they diverge silently if gradients are not averaged."""

from __future__ import annotations

from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import nn

from pytorch_accel_lite.base.modules.quantised_weights import all_plain_parts
from pytorch_accel_lite.base.modules.unwrapping import unwrap
from pytorch_accel_lite.base.values.tensor_bits import sums_of_bits
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.trainer_parts.objects_in_attributes import other_modules
from pytorch_accel_lite.run.trainer_parts.parameters_of_optimizers import all_optimized_parameters, updated_parameters

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
    if not any(name in found.trained for found in by_rank):
        return (
            "It is frozen (requires_grad=False), so nothing averages it, but something changes it on each process by "
            "itself, such as forward(). Let all change it alike, by values from trainer.gather(), or register it as a "
            f"buffer, which is copied from rank 0 before each forward pass. {_ON_PURPOSE}"
        )
    bypasses = "bypasses the averaging of gradients. Call self.model(...) in your step methods."
    if prepared is not None and not prepared.has_run:
        return f"trainer.model was never called in this run: a step that calls the bare module {bypasses} {_ON_PURPOSE}"
    unused = {rank: found.without_gradient for rank, found in enumerate(by_rank) if found.without_gradient}
    if unused:
        listed = "; ".join(
            f"{', '.join(map(repr, names[:_MAX_NAMED]))}{', ...' * (len(names) > _MAX_NAMED)} on rank {rank}"
            for rank, names in unused.items()
        )
        return (
            f"In the first update, the loss did not depend on these parameters: {listed}. torch averages no gradients "
            f"until each parameter has one. {_UNUSED} {_ON_PURPOSE}"
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
    return {name: data for name, data in others.items() if type(data) is torch.Tensor and _is_readable(data)}


def _is_readable(data: torch.Tensor) -> bool:
    return data.layout is torch.strided and not data.is_quantized and data.device.type != "meta"
