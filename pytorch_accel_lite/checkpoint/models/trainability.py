"""Which parameters are trained: frozen parameters, modules kept in evaluation mode, groups added to an optimizer.

A run may change these, for example by unfreezing. A resumed run restores the changes; all else stays as in the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.modules import keep_in_eval, release_from_eval, stays_in_eval, without_compile
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.checkpoint.disk.shards import is_sharded_tensor
from pytorch_accel_lite.checkpoint.models.weights import sharded_like
from pytorch_accel_lite.optimizers.optimizer_parts import (
    TrainerOptimizer,
    is_created,
    optimized_parameters,
    single_optimizers,
)
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.trained_objects import all_optimizers, other_modules


def trainability(trainer: TrainerLike) -> dict[str, dict[str, int]]:
    """Return by name whether each parameter is trained, and whether each module is kept in evaluation mode."""
    return {
        "trained": {name: parameter.requires_grad for name, parameter in _parameters(trainer)},
        "stays_in_eval": {name: stays_in_eval(module) for name, module in _modules(trainer)},
    }


def note_trainability(trainer: TrainerLike) -> None:
    """Note which parameters are trained after the starting events, which a resumed run repeats."""
    trainer.current_run.trainability = _with_groups(trainer)


def note_left_trainability(trainer: TrainerLike, run: Run) -> None:
    """Note at the end of a run which parameters are trained."""
    run.left_trainability = _with_groups(trainer)


def undo_trainability(trainer: TrainerLike, before: Run) -> None:
    """Let parameters be trained as before a run of this trainer, unless that has been changed since its end."""
    created, left = before.trainability, before.left_trainability
    if not created or not left:
        return
    for name, parameter in _parameters(trainer):
        if name in created["trained"] and parameter.requires_grad == left["trained"].get(name):
            parameter.requires_grad_(bool(created["trained"][name]))
    for name, part in _parts(trainer).items():
        count = created["groups"].get(name)
        if count is not None and len(part.param_groups) == left["groups"].get(name):
            for parameter in (parameter for group in part.param_groups[count:] for parameter in group["params"]):
                part.state.pop(parameter, None)
            del part.param_groups[count:]


def _with_groups(trainer: TrainerLike) -> dict[str, dict[str, int]]:
    """Return ``trainability()``, and the number of groups of each part of the optimizers."""
    return trainability(trainer) | {"groups": {name: len(part.param_groups) for name, part in _parts(trainer).items()}}


def _parts(trainer: TrainerLike) -> dict[str, Optimizer]:
    """Return the parts of all optimizers by name."""
    owners = all_optimizers(trainer).items()
    return {f"{name}[{part}]": each for name, owner in owners for part, each in single_optimizers(owner).items()}


def capture_trainability(trainer: TrainerLike) -> StateDict:
    """Return how the run has changed ``trainability()``, its original values, and the parameters of each group."""
    now, before = trainability(trainer), trainer.current_run.trainability
    changed = {
        kind: {name: value for name, value in values.items() if value != before.get(kind, {}).get(name, value)}
        for kind, values in now.items()
    }
    frozen = sorted(name for name, is_trained in now["trained"].items() if not is_trained)
    return {"changed": changed, "frozen": frozen, "groups": _groups(trainer)}


def _groups(trainer: TrainerLike) -> dict[str, dict[str, list[list[str | None]]]]:
    """Return the names of the parameters in each group of each part of each optimizer."""
    names = {id(parameter): name for name, parameter in _parameters(trainer)}
    return {
        name: {
            part: [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
            for part, optimizer in single_optimizers(owner).items()
        }
        for name, owner in all_optimizers(trainer).items()
    }


def lacks_groups(optimizer: TrainerOptimizer, state: StateDict) -> bool:
    """Whether an optimizer has fewer groups of parameters than its state."""
    return is_created(optimizer) and len(optimizer.param_groups) < len(state.get("param_groups", ()))


def order_groups(trainer: TrainerLike, saved: StateDict) -> None:
    """Put the parameters of each group in the order of the saved run: if made from a set, it differs by process."""
    names = {id(parameter): name for name, parameter in _parameters(trainer)}
    for name, owner in all_optimizers(trainer).items():
        parts = single_optimizers(owner)
        for part, groups in saved.get("groups", {}).get(name, {}).items():
            for group, order in zip(parts[part].param_groups if part in parts else (), groups, strict=False):
                now = [names.get(id(parameter)) for parameter in group["params"]]
                if now != order and None not in order and sorted(map(str, now)) == sorted(order):
                    for key in ("params", "param_names"):
                        if key in group:
                            group[key][:] = [group[key][now.index(parameter)] for parameter in order]


def add_missing_groups(trainer: TrainerLike, saved: StateDict) -> None:
    """Add to the optimizers the groups that the saved run had added, if their parameters are known by name."""
    parameters = dict(_parameters(trainer))
    for name, owner in all_optimizers(trainer).items():
        for part, groups in saved.get("groups", {}).get(name, {}).items():
            optimizer = single_optimizers(owner).get(part)
            if optimizer is None:
                continue
            for group in groups[len(optimizer.param_groups) :]:
                if all(parameter in parameters for parameter in group):
                    optimizer.add_param_group({"params": [parameters[parameter] for parameter in group]})


def restore_trainability(trainer: TrainerLike, saved: StateDict) -> None:
    """Restore the saved run's changes of which parameters are trained. Call it on every process."""
    if "changed" not in saved:  # an earlier version saved the state
        return
    started = trainer.current_run.trainability
    before, changed = trainability(trainer), saved["changed"]
    # All else is as after the starting events, even if the events of the epoch have changed it.
    target = {kind: {**values, **started.get(kind, {}), **changed.get(kind, {})} for kind, values in before.items()}
    for name, parameter in _parameters(trainer):
        if parameter.requires_grad != target["trained"][name]:
            parameter.requires_grad_(bool(target["trained"][name]))
            parameter.grad = None
    for name, module in _modules(trainer):
        is_kept = target["stays_in_eval"].get(name, False)
        if is_kept != stays_in_eval(module):
            (keep_in_eval if is_kept else release_from_eval)(module)
    now = trainability(trainer)["trained"]
    if now != before["trained"] and trainer.can_rewrap_model:
        trainer.rewrap_model()
    _say_what_differs(trainer, saved, now)


def capture_gradients(trainer: TrainerLike) -> StateDict:
    """Return by parameter the gradients that a method of the user has not cleared, so that a later update uses them."""
    optimized = {id(p) for optimizer in all_optimizers(trainer).values() for p in optimized_parameters(optimizer)}
    left = {name: p.grad for name, p in _parameters(trainer) if p.grad is not None and id(p) in optimized}
    return {name: grad for name, grad in left.items() if is_sharded_tensor(grad) or grad.norm() != 0}


def restore_gradients(trainer: TrainerLike, saved: StateDict, frozen: Collection[str]) -> None:
    """Restore the gradients that ``capture_gradients`` has returned, of parameters that are trained as they were.

    Args:
        frozen: the parameters that the saved run had frozen. An optimizer would update others by a gradient.
    """
    for name, parameter in _parameters(trainer):
        if name in saved and (parameter.requires_grad or name in frozen):
            gradient = sharded_like(parameter, saved[name])
            parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)


def _say_what_differs(trainer: TrainerLike, saved: StateDict, now: Mapping[str, int]) -> None:
    frozen = {*saved["frozen"]} & now.keys()
    thawed = listed(sorted(name for name in frozen if now[name]), 10)
    others = listed(sorted(name for name, is_trained in now.items() if not is_trained and name not in frozen), 10)
    parts = [f"the program trains {thawed}"] if thawed else []
    parts += [f"the program freezes {others}"] if others else []
    if parts:
        trainer.print(
            f"Different from the run that saved the state: {', and '.join(parts)}. The program's choice holds."
        )


def _parameters(trainer: TrainerLike) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in _roots(trainer).items():
        yield from without_compile(dict(module.named_parameters(prefix))).items()


def _modules(trainer: TrainerLike) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in _roots(trainer).items():
        yield from without_compile(dict(module.named_modules(prefix=prefix))).items()


def _roots(trainer: TrainerLike) -> dict[str, nn.Module]:
    """Return the modules that may be trained, by the prefix of the names of their parts: ``""`` for the model."""
    others = {f"trainer.{name}": module for name, module in other_modules(trainer).items()}
    return {"": trainer.get_model(keep_torch_compile=False), **others}
