"""Whether all processes still hold the same weights: where gradients are not averaged, they drift apart in silence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from pytorch_accel_lite import attributes
from pytorch_accel_lite.distributed.prepared import unwrap
from pytorch_accel_lite.gradients import updated_parameters

if TYPE_CHECKING:
    from pytorch_accel_lite.distributed.ranks import Ranks
    from pytorch_accel_lite.trainer import Trainer

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_replicas(self: Trainer) -> None:
    """Check that all processes hold the same weights, to the last bit. To be called on every process.

    Looks at every trained parameter: the optimizer's, and those of optimizers that a subclass holds as attributes.
    Weights that are spread over the processes are left out.

    :raises RuntimeError: names the ranks that differ, the parameter, and the likely cause
    """
    prepared = self.prepared_model
    if self.ranks.world_size == 1 or (prepared is not None and prepared.outlives_runs):
        return
    parameters = _trained_parameters(self)
    sums = _sums_of_bits(parameters.values())
    differing = _first_difference(self.ranks, list(parameters), sums)
    if differing is None:
        return
    raise RuntimeError(f"{differing} {_likely_cause(self)}")


def _likely_cause(trainer: Trainer) -> str:
    prepared = trainer.prepared_model
    bypasses = "bypasses the averaging of gradients. Call self.model(...) in your step methods."
    on_purpose = "Pass check_replicas=False to the Trainer if the weights are meant to differ."
    if prepared is not None and not prepared.has_run:
        return f"trainer.model was never called in this run: a step that calls the bare module {bypasses} {on_purpose}"
    unused = _without_gradient(trainer.model)
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        return (
            f"The loss does not depend on {', '.join(unused[:3])}{more}, and torch averages no gradients until it has "
            "those of every parameter. Call requires_grad_(False) on parameters that are not used; where they are used "
            "in some steps only, pass accelerator=Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
            "find_unused_parameters=True)]) to the Trainer."
        )
    return (
        "Likely causes: a step that calls the bare module or a part of it, parameters that were unfrozen during "
        f"the run without rewrap_model(), or a module that is trained beside the model: each of them {bypasses} "
        "Average the gradients of a module beside it by self.accelerator.prepare(module). Other causes: optimizers "
        f"that were made with other settings, or modules with other weights, on each process. {on_purpose}"
    )


def _without_gradient(model: nn.Module) -> list[str]:
    """Return the parameters for whose gradients ``DistributedDataParallel`` still waits after a backward pass."""
    check = getattr(getattr(model, "reducer", None), "_check_reducer_finalized", None)
    try:
        if check is not None:
            check()
    except RuntimeError as error:  # what the next forward pass would say
        waiting = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        names = [name for name, parameter in unwrap(model).named_parameters() if parameter.requires_grad]
        places = map(int, waiting[1].split()) if waiting else []
        return [repr(names[place]) for place in places if place < len(names)]
    return []


def _trained_parameters(trainer: Trainer) -> dict[str, nn.Parameter]:
    """Return what the trainer's optimizers update, by the names that it has in the trainer's modules."""
    names: dict[int, str] = {}
    for prefix, module in {"": unwrap(trainer.model), **attributes.modules(trainer)}.items():
        for name, parameter in module.named_parameters(prefix):
            names.setdefault(id(parameter), name)
    trained = [*updated_parameters(trainer), *attributes.all_optimized_parameters(trainer)]
    by_id = {id(parameter): parameter for parameter in trained if not hasattr(parameter, "device_mesh")}
    return {names.get(key, f"parameter {place}"): value for place, (key, value) in enumerate(by_id.items())}


def _sums_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return for each tensor the sum of its elements, read as whole numbers: it changes with every single bit."""
    sums = []
    for tensor in tensors:
        data = tensor.detach()
        if data.is_complex():
            data = torch.view_as_real(data)
        sums.append(data.view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64))
    return torch.stack(sums).tolist() if sums else []  # one read of the device


def _first_difference(ranks: Ranks, names: list[str], sums: list[int]) -> str | None:
    """Say which ranks differ in which parameter, ``None`` when none do."""
    digests = ranks.all_gather_object(hash(tuple(sums)))
    if len(set(digests)) == 1:
        return None
    by_rank = ranks.all_gather_object(dict(zip(names, sums, strict=True)))
    first = by_rank[0]
    for name in dict.fromkeys(name for found in by_rank for name in found):
        others = [rank for rank, found in enumerate(by_rank) if found.get(name) != first.get(name)]
        if others:
            listed = ", ".join(map(str, others))
            return f"The processes no longer train the same weights: {name!r} differs on rank {listed} from rank 0."
    return None
