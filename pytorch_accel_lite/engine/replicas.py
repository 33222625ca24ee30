"""Checking that all processes hold the same weights, which silently diverge if gradients are not averaged."""

from __future__ import annotations

from itertools import chain

from torch import nn

from pytorch_accel_lite.base.inspection import sums_of_bits
from pytorch_accel_lite.base.modules import unwrap
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.optimizers import attributes
from pytorch_accel_lite.optimizers.gradients import updated_parameters


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
    sums = dict(zip(parameters, sums_of_bits(parameters.values()), strict=True))
    if len(set(self.ranks.all_gather_object(hash(tuple(sums.values()))))) == 1:
        return
    by_rank = self.ranks.all_gather_object(sums)
    for name in dict.fromkeys(chain.from_iterable(by_rank)):
        differing = [str(rank) for rank, of_rank in enumerate(by_rank) if of_rank.get(name) != by_rank[0].get(name)]
        if differing:
            raise RuntimeError(
                f"The processes no longer train the same weights: {name!r} differs on rank {', '.join(differing)} from "
                f"rank 0. {_likely_cause(self)}"
            )


def _likely_cause(trainer: TrainerLike) -> str:
    prepared = trainer.prepared_model
    bypasses = "bypasses the averaging of gradients. Call self.model(...) in your step methods."
    on_purpose = "Pass check_replicas=False to the Trainer if the weights are supposed to differ."
    if prepared is not None and not prepared.has_run:
        return f"trainer.model was never called in this run: a step that calls the bare module {bypasses} {on_purpose}"
    return (
        "Likely causes: a step that calls the bare module or a part of it, parameters that were unfrozen during "
        f"the run without rewrap_model(), or a module that is trained besides the model: each of these {bypasses} "
        "To average the gradients of an additional module, call self.accelerator.prepare(module). Or the loss does not "
        "depend on all parameters: torch averages no gradients until it has those of every one. Freeze the unused ones "
        "with requires_grad_(False), or pass accelerator=Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
        "find_unused_parameters=True)]). Other causes: optimizers created with different settings; modules with "
        "different weights, on each process; or weights that the model draws in its first forward pass: call it once "
        f"before the run, after torch.manual_seed. {on_purpose}"
    )


def _trained_parameters(trainer: TrainerLike) -> dict[str, nn.Parameter]:
    """Return the parameters that the trainer's optimizers update, by their names in the trainer's modules."""
    names: dict[int, str] = {}
    for prefix, module in {"": unwrap(trainer.model), **attributes.modules(trainer)}.items():
        for name, parameter in module.named_parameters(prefix):
            names.setdefault(id(parameter), name)
    trained = [*updated_parameters(trainer), *attributes.all_optimized_parameters(trainer)]
    by_id = {id(parameter): parameter for parameter in trained if not hasattr(parameter, "device_mesh")}
    return {names.get(key, f"parameter {number}"): value for number, (key, value) in enumerate(by_id.items())}
