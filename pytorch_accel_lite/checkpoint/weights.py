"""Full states of models and optimizers, as a single process would have them, even if the weights are sharded (FSDP2).

Frozen weights may be left out: their fingerprints tell whether a model that loads the rest has the same ones.

Sharded tensors are gathered, so a state saved by any number of processes, sharded or not, can be loaded by any other.
The host memory of a saving process must hold all weights and the optimizer's state. Gathering is a collective
operation: all processes must call it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from pytorch_accel_lite.base.inspection import sums_of_bits
from pytorch_accel_lite.checkpoint.files import FROZEN
from pytorch_accel_lite.checkpoint.shards import find_tensors, is_sharded

_INDEX = "model.safetensors.index.json"  # of the files of a large model, as the Hugging Face Hub has it
_COMPILED = "_orig_mod."
_PARALLEL = "module."


def full_state_dict(state: Any, keep: bool) -> Any:
    """Return a state with every sharded tensor gathered in host memory.

    :param keep: ``False`` on processes that will not write it, where sharded tensors become ``None``
    """

    def gather(tensor: Any) -> Any:
        if not is_sharded(tensor):
            return tensor
        full = tensor.full_tensor()
        return full.to("cpu") if keep else None

    return tree_map_only(torch.Tensor, gather, state)


def model_state(model: nn.Module, keep: bool = True) -> dict[str, Any]:
    """Return the full state of a model, under its names without ``torch.compile``."""
    return dict(full_state_dict(without_compile(model.state_dict()), keep))


def without_compile(state: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the prefixes of ``torch.compile`` from the names in a state."""
    return {key.replace(_COMPILED, ""): value for key, value in state.items()}


def fit_model_state(
    model: nn.Module,
    state: Mapping[str, Any],
    source: str | os.PathLike[str],
    strict: bool = True,
    left_out: Collection[str] = (),
) -> dict[str, Any]:
    """Convert a full state for ``model.load_state_dict``, even if the model is sharded, without loading it.

    Prefixes that wrappers have left in the names are ignored.

    :param strict: ``False`` to warn of entries that do not fit and return the rest
    :param left_out: entries that the state lacks on purpose: the model must have them, and keeps its own
    :raises ValueError: if the state does not fit; lists missing and unexpected keys and mismatched shapes
    """
    current = model.state_dict()
    names = {key.replace(_COMPILED, ""): key for key in current}
    own = without_compile(current)
    state = _without_wrappers(state, own)
    shapes = {
        key: f"{key} (checkpoint {tuple(state[key].shape)}, model {tuple(own[key].shape)})"
        for key in own.keys() & state.keys()
        # Lazy layers have no shape before their first batch, and extra state never has one.
        if isinstance(own[key], torch.Tensor) and not is_lazy(own[key]) and state[key].shape != own[key].shape
    }
    problems = {
        "missing in the checkpoint": own.keys() - state.keys() - set(left_out),
        "not in the model": (state.keys() | set(left_out)) - own.keys(),
        "of a different shape": shapes.values(),
    }
    if any(problems.values()):
        text = f"The checkpoint {os.fspath(source)!r} does not fit the model {type(model).__name__}: "
        text += "; ".join(f"{problem}: {listed(keys)}" for problem, keys in problems.items() if keys)
        if strict:
            raise ValueError(
                f"{text}. Create the model as it was when it was saved, or use load_checkpoint(..., strict=False) to "
                "load only the weights that fit."
            )
        warnings.warn(f"{text}. The rest is loaded.", stacklevel=3)
    fitting = [key for key in state if key in own and key not in shapes]
    fitted = OrderedDict((names[key], sharded_like(own[key], state[key])) for key in fitting)
    vars(fitted)["_metadata"] = getattr(current, "_metadata", {})  # versions, which some modules need
    return fitted


def _without_wrappers(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the prefixes of ``torch.compile`` and ``DistributedDataParallel``, as many as fit the model best."""
    candidates = [without_compile(state)]
    while candidates[-1] and all(key.startswith(_PARALLEL) for key in candidates[-1]):
        candidates.append({key.removeprefix(_PARALLEL): value for key, value in candidates[-1].items()})
    return max(candidates, key=lambda candidate: len(candidate.keys() & own.keys()))


def read_pretrained(directory: Path, model: nn.Module) -> dict[str, Any]:
    """Read weights from a directory of safetensors files, each process only what it needs for a sharded model.

    :return: the content of a checkpoint. Weights that are tied in the model have all their names.
    :raises FileNotFoundError: if the directory has no weights, or not all that its index names
    :raises ValueError: if a file is damaged
    """
    index = json.loads((directory / _INDEX).read_text()) if (directory / _INDEX).is_file() else {}
    names = sorted(set(index.get("weight_map", {}).values()))
    files = [directory / name for name in names] or sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"There is no checkpoint at {os.fspath(directory)!r}: it has no weights as safetensors."
        )
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{missing[0]} is missing in {os.fspath(directory)!r}, whose index names it.")
    own = without_compile(model.state_dict())
    weights = {name: stored.read(own.get(name)) for name, stored in find_tensors(files).items()}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = without_compile(dict(named))
    read = {id(tensors[name]): value for name, value in weights.items() if name in tensors}
    tied = {name: read[id(tensor)] for name, tensor in tensors.items() if name in own and id(tensor) in read}
    return {"model_state_dict": tied | weights, FROZEN: json.loads(index.get("metadata", {}).get(FROZEN, "{}"))}


def listed(names: Collection[str], most: int = 10) -> str:
    """Return the first of the sorted names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(sorted(names)[:most])}{more}"


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the whole state of an optimizer, whose parameters may be sharded.

    :raises ValueError: when it does not fit the optimizer's groups and parameters
    """
    groups = getattr(optimizer, "param_groups", ())  # of one that is yet to be made: it keeps the state as it is
    parameters = dict(enumerate(p for group in groups for p in group["params"]))
    sharded = {
        index: {name: sharded_like(parameters.get(index), value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    had = [group.keys() for group in groups]
    optimizer.load_state_dict({**state, "state": sharded})
    # What a newer torch has added to a class of optimizers, that class has filled in.
    now = getattr(optimizer, "param_groups", ())
    lost = {key for keys, group in zip(had, now, strict=False) for key in keys - group.keys()}
    if missing := sorted(lost & getattr(optimizer, "defaults", {}).keys()):
        raise ValueError(f"it is of another class of optimizers, without {', '.join(missing)}")


def sharded_like(own: Any, value: Any) -> Any:
    """Return a whole tensor spread over the processes as a parameter is, or as it is beside one that is not."""
    is_whole = isinstance(value, torch.Tensor) and value.ndim > 0 and not is_sharded(value)
    if not is_sharded(own) or not is_whole:  # a step count is not sharded, though its parameter is
        return value
    from torch.distributed.tensor import DTensor, Replicate  # take longer to import than all else here

    mesh = own.device_mesh
    whole = DTensor.from_local(value.to(own.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=own.placements)  # each process cuts out its own shard


def fingerprints(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return a number for each tensor, by name, that changes with any of its bits.

    Skips tensors without values, and sparse ones. A collective operation if they are sharded.
    """
    with_values = {name: value for name, value in tensors.items() if _has_values(value)}
    whole = (full_state_dict(value, keep=True) for value in with_values.values())  # one at a time
    return dict(zip(with_values, sums_of_bits(whole), strict=True))


def _has_values(value: Any) -> bool:
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_plain and not value.is_meta and not is_lazy(value)


def model_fingerprints(model: nn.Module) -> dict[str, int]:
    """Return the fingerprints of all parameters of a model. A collective operation if they are sharded."""
    return fingerprints(_parameters(model))


def check_has_trainable(model: nn.Module) -> None:
    """Check that a model has something to save once its frozen parameters are left out.

    :raises ValueError: if all of its parameters are frozen
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"trainable_only=True would leave out all weights: no parameter of {type(model).__name__} requires a "
            "gradient. Save all weights, or unfreeze the parameters that were trained."
        )


def leave_out_frozen(
    model: nn.Module, state: dict[str, Any], created: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Remove the frozen parameters from the full state of a model, and return their fingerprints by name.

    Buffers stay, as training changes them even if everything around them is frozen.

    :param created: fingerprints of weights that the loading program will create itself, such as pretrained ones; other
        weights stay. By default, all frozen parameters are removed.
    """
    frozen = {name for name, parameter in _parameters(model).items() if not parameter.requires_grad}
    if created is not None:
        now = fingerprints({name: state[name] for name in frozen})
        frozen = {name for name, number in now.items() if created.get(name) == number}
    prefixes = tuple(f"{name}." for name in frozen)  # quantised weights have further entries, such as "weight.absmax"
    names = [name for name in state if name in frozen or name.startswith(prefixes)]
    return fingerprints({name: state.pop(name) for name in names})


def describe_other_weights(model: nn.Module, left_out: Mapping[str, int], source: str | os.PathLike[str]) -> str:
    """Describe which weights of a model are not those that were left out; empty if it has all of them.

    A collective operation if they are sharded.
    """
    own = {name: value for name, value in _parameters(model).items() if name in left_out}
    current = fingerprints(own)
    others = [name for name, number in left_out.items() if current.get(name, number) != number]
    if not others:
        return ""
    return (
        f"{os.fspath(source)!r} holds only what was trained, and the frozen weights of {type(model).__name__} are not "
        f"those that it was trained with. They differ in {listed(others)}."
    )


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return without_compile(dict(model.named_parameters(remove_duplicate=False)))
