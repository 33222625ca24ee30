"""Full states, as a single process would have them, also of sharded models (FSDP2), and the weights of models.

Sharded tensors are gathered, so a state saved by any number of processes, sharded or not, can be loaded by any other.
The host memory of a saving process must hold all weights and the optimizer's state. Gathering is a collective
operation: all processes must call it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.modules import without_compile
from pytorch_accel_lite.base.types import JsonObject, Keys, StateDict, Tree
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.checkpoint.disk.checkpoint_files import checkpoint_of
from pytorch_accel_lite.checkpoint.disk.checksums import verify
from pytorch_accel_lite.checkpoint.disk.safetensors_files import open_tensors
from pytorch_accel_lite.checkpoint.disk.shards import find_tensors, gather_tensor, is_sharded_tensor
from pytorch_accel_lite.checkpoint.disk.shared_disks import check_on_all_ranks
from pytorch_accel_lite.checkpoint.disk.torch_files import map_nested
from pytorch_accel_lite.checkpoint.models.model_forms import read_in_form
from pytorch_accel_lite.run.run import TrainerLike

#: The file of a model's weights in a directory, and the index of a large model's files, as on the Hugging Face Hub.
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PARALLEL = "module."


def full_state_dict(state: Tree, keep: bool) -> Tree:
    """Return a state with every sharded tensor gathered in host memory.

    Args:
        keep: ``False`` on processes that will not write the state; there, sharded tensors become ``None``
    """

    def gather(path: Keys, value: Tree) -> Tree:
        if not is_sharded_tensor(value):
            return value
        whole = gather_tensor(value)
        return whole.to("cpu") if keep else None

    return map_nested(gather, state)


def model_state(model: nn.Module, keep: bool = True) -> StateDict:
    """Return the full state of a model, under its names without ``torch.compile``."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return _state_of_zero_3(model, keep)
    return dict(full_state_dict(without_compile(model.state_dict()), keep))


def _state_of_zero_3(model: nn.Module, keep: bool) -> StateDict:
    """Return the full state of a model whose parameters DeepSpeed has divided, in host memory."""
    with sys.modules["deepspeed"].zero.GatheredParameters(list(model.parameters())):
        state = without_compile(model.state_dict())
        return {name: value.detach().to("cpu", copy=True) if keep else None for name, value in state.items()}


def fit_model_state(
    model: nn.Module,
    state: StateDict,
    source: str | os.PathLike[str],
    strict: bool = True,
    left_out: Collection[str] = (),
) -> StateDict:
    """Convert a full state for ``model.load_state_dict``, without loading it; the model may be sharded.

    Prefixes that wrappers have left in the names are ignored.

    Args:
        strict: ``False`` to warn of entries that do not fit, and return the other entries
        left_out: entries that the state lacks on purpose; the model must have these, and keeps its own

    Raises:
        ValueError: if the state does not fit; lists missing and unexpected keys and mismatched shapes
    """
    current = model.state_dict()
    names = without_compile({key: key for key in current})
    local = without_compile(current)
    state = _without_wrappers(state, local)
    shapes = {
        key: f"{key} (checkpoint {_shape_of(state[key])}, model {tuple(local[key].shape)})"
        for key in local.keys() & state.keys()
        # Lazy layers have no shape before their first batch, and extra state never has one.
        if isinstance(local[key], torch.Tensor)
        and not is_lazy(local[key])
        and _shape_of(state[key]) != tuple(local[key].shape)
    }
    if shapes:
        of_any_shape = _prefixes_of_any_shape(model)
        shapes = {key: text for key, text in shapes.items() if key.rpartition(".")[0] not in of_any_shape}
    problems = {
        "missing in the checkpoint": local.keys() - state.keys() - set(left_out),
        "not in the model": (state.keys() | set(left_out)) - local.keys(),
        "of a different shape": shapes.values(),
    }
    if any(problems.values()):
        text = f"The checkpoint {os.fspath(source)!r} does not fit the model {type(model).__name__}: "
        text += "; ".join(f"{problem}: {listed(sorted(keys), 10)}" for problem, keys in problems.items() if keys)
        if strict:
            raise ValueError(
                f"{text}. Create the model as it was when it was saved, or use load_checkpoint(..., strict=False) to "
                "load only the weights that fit."
            )
        warn_outside(f"{text}. The rest is loaded.")
    fitting = [key for key in state if key in local and key not in shapes]
    fitted = OrderedDict((names[key], sharded_like(local[key], state[key])) for key in fitting)
    vars(fitted)["_metadata"] = getattr(current, "_metadata", {})  # some modules need the versions in it
    return fitted


def _shape_of(value: object) -> tuple[int, ...] | str:
    """Return the shape of a weight; of anything else that a file has in its place, the type."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _prefixes_of_any_shape(model: nn.Module) -> set[str]:
    """Return the names of modules that load their own entries, which may then have any shape.

    The observers of quantization-aware training do so, for example. Those of ``torch.nn`` take only their own shapes.
    """

    def loads_itself(module: nn.Module) -> bool:
        defining = next(kind for kind in type(module).__mro__ if "_load_from_state_dict" in vars(kind))
        return not defining.__module__.startswith("torch.nn.")

    return {*without_compile({name: module for name, module in model.named_modules() if loads_itself(module)})}


def _without_wrappers(state: StateDict, model_names: Mapping[str, object]) -> StateDict:
    """Remove the prefixes of ``torch.compile``, and as many of ``DistributedDataParallel``'s as fit the model best."""
    candidates = [without_compile(state)]
    while candidates[-1] and all(key.startswith(_PARALLEL) for key in candidates[-1]):
        candidates.append({key.removeprefix(_PARALLEL): value for key, value in candidates[-1].items()})
    return max(candidates, key=lambda candidate: len(candidate.keys() & model_names.keys()))


def verify_weights(trainer: TrainerLike, location: Path) -> None:
    """Compare a checkpoint, or a directory of safetensors files, with its own checksums, once on every machine.

    Call it on every process. Missing files are left to the readers.

    Raises:
        ValueError: on all processes, if a file is damaged on any of them; names the file
    """

    def verify_all() -> None:
        if trainer.accelerator.is_local_main_process:
            with suppress(FileNotFoundError):
                for file in _find_files(location)[0] if location.is_dir() else [location]:
                    verify(file)

    check_on_all_ranks(trainer.ranks, verify_all)


def _find_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the safetensors files of the weights in a directory, and the metadata stored with them.

    Raises:
        FileNotFoundError: if there are no such files, or if files in the index are missing
    """
    single = directory / WEIGHTS
    if single.is_file():
        return [single], open_tensors(single)[1]
    index, names = _read_index(directory / _INDEX) if (directory / _INDEX).is_file() else ({}, set[str]())
    files = [directory / name for name in sorted(names)] or sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"There is no checkpoint at {os.fspath(directory)!r}: it has no weights as safetensors."
        )
    if missing := [path.name for path in files if not path.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is missing in {os.fspath(directory)!r}, whose index names it.")
    return files, index.get("metadata", {})


def _read_index(path: Path) -> tuple[JsonObject, set[str]]:
    """Return the index of a large model's files, and the names of the files.

    Raises:
        ValueError: if the file is damaged, or no index
    """
    try:
        index = json.loads(path.read_bytes())
        names = {os.fspath(name) for name in index.get("weight_map", {}).values()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The file {os.fspath(path)!r} is damaged, or not the index of a model's files: restore it from a copy."
        ) from error
    return index, names


def read_pretrained(directory: Path, model: nn.Module) -> StateDict:
    """Read weights from a directory of safetensors files. For a sharded model, each process reads only its shards.

    Returns:
        the content of a checkpoint. Weights that are tied in the model have all their names. If the files have adapters
        alone, all other weights of the model count as left out, with unknown checksums.

    Raises:
        FileNotFoundError: if the directory has no weights, or if files in its index are missing
        ValueError: if a file is damaged, or only an extension that is missing can read the files
    """
    if (content := read_in_form(directory, model)) is not None:
        return content
    files, metadata = _find_files(directory)
    current = without_compile(model.state_dict())
    weights = {name: stored.read(current.get(name)) for name, stored in find_tensors(files).items()}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = without_compile(dict(named))
    read = {id(tensors[name]): value for name, value in weights.items() if name in tensors}
    tied = {name: read[id(tensor)] for name, tensor in tensors.items() if name in current and id(tensor) in read}
    return checkpoint_of(tied | weights, metadata)


def sharded_like(like: torch.Tensor | None, value: Tree) -> Tree:
    """Return a full tensor sharded like a parameter, or unchanged if the parameter is not sharded."""
    is_unsharded = isinstance(value, torch.Tensor) and value.ndim > 0 and not is_sharded_tensor(value)
    if not is_sharded_tensor(like) or not is_unsharded:  # a step count is not sharded, though its parameter is
        return value
    from torch.distributed.tensor import DTensor, Replicate  # slow to import

    mesh = like.device_mesh
    replicated = DTensor.from_local(value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)  # each process keeps its shard
