"""Checking that all processes hold the same weights, which silently diverge if gradients are not averaged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from pytorch_accel_lite.base.inspection import sums_of_bits
from pytorch_accel_lite.base.modules import unwrap
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.optimizers import attributes
from pytorch_accel_lite.optimizers.gradients import updated_parameters

if TYPE_CHECKING:
    from pytorch_accel_lite.distributed.ranks import Ranks


def compare_replicas(self: TrainerLike) -> None:
    """Check that all processes hold the same weights, to the last bit. Call it on every process.

    Checks every trained parameter: those of the optimizer, and of optimizers that are attributes of a subclass. Sharded
    weights are skipped.

    :raises RuntimeError: if they differ; names the ranks, the parameter and the likely cause
    """
    prepared = self.prepared_model
    if self.ranks.world_size == 1 or (prepared is not None and prepared.outlives_runs):
        return
    parameters = _trained_parameters(self)
    sums = sums_of_bits(parameters.values())
    differing = _first_difference(self.ranks, list(parameters), sums)
    if differing is None:
        return
    raise RuntimeError(f"{differing} {_likely_cause(self)}")


def _likely_cause(trainer: TrainerLike) -> str:
    prepared = trainer.prepared_model
    bypasses = "bypasses the averaging of gradients. Call self.model(...) in your step methods."
    on_purpose = "Pass check_replicas=False to the Trainer if the weights are supposed to differ."
    if prepared is not None and not prepared.has_run:
        return f"trainer.model was never called in this run: a step that calls the bare module {bypasses} {on_purpose}"
    unused = _without_gradient(trainer.model)
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        return (
            f"The loss does not depend on {', '.join(unused[:3])}{more}, and torch averages no gradients until it has "
            "those of every parameter. Call requires_grad_(False) on unused parameters; if they are used in some steps "
            "only, pass accelerator=Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
            "find_unused_parameters=True)]) to the Trainer."
        )
    return (
        "Likely causes: a step that calls the bare module or a part of it, parameters that were unfrozen during "
        f"the run without rewrap_model(), or a module that is trained besides the model: each of these {bypasses} "
        "To average the gradients of an additional module, call self.accelerator.prepare(module). Other causes: "
        "optimizers created with different settings, or modules with different weights, on each process. "
        f"{on_purpose}"
    )


def _without_gradient(model: nn.Module) -> list[str]:
    """Return the parameters whose gradients ``DistributedDataParallel`` is still waiting for after a backward pass."""
    check = getattr(getattr(model, "reducer", None), "_check_reducer_finalized", None)
    try:
        if check is not None:
            check()
    except RuntimeError as error:  # the error that the next forward pass would raise
        waiting = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        names = [name for name, parameter in unwrap(model).named_parameters() if parameter.requires_grad]
        indices = map(int, waiting[1].split()) if waiting else []
        return [repr(names[index]) for index in indices if index < len(names)]
    return []


def _trained_parameters(trainer: TrainerLike) -> dict[str, nn.Parameter]:
    """Return the parameters that the trainer's optimizers update, by their names in the trainer's modules."""
    names: dict[int, str] = {}
    for prefix, module in {"": unwrap(trainer.model), **attributes.modules(trainer)}.items():
        for name, parameter in module.named_parameters(prefix):
            names.setdefault(id(parameter), name)
    trained = [*updated_parameters(trainer), *attributes.all_optimized_parameters(trainer)]
    by_id = {id(parameter): parameter for parameter in trained if not hasattr(parameter, "device_mesh")}
    return {names.get(key, f"parameter {number}"): value for number, (key, value) in enumerate(by_id.items())}


def _first_difference(ranks: Ranks, names: list[str], sums: list[int]) -> str | None:
    """Describe which ranks differ in which parameter; ``None`` if they all agree."""
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
