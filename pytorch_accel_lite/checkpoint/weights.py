"""Single-file checkpoints that load anywhere with ``torch.load(path, weights_only=True)``."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytorch_accel_lite.checkpoint.files import durable_file, load_plain, storable

StrPath = str | os.PathLike[str]
_COMPILED = "_orig_mod."
_PARALLEL = "module."


def write_checkpoint(checkpoint: Mapping[str, Any], path: StrPath) -> None:
    """Write a checkpoint so that ``path`` holds the old or the new one whole, whenever the process is killed.

    :raises TypeError: when an entry could not be loaded again without running code; names the path to it
    :raises OSError: when it cannot be written; the previous file is left as it was
    """
    # The weights are tensors by name; their mapping carries versions of modules, which a copy would lose.
    content = {k: v if k == "model_state_dict" else storable(v, f"checkpoint[{k!r}]") for k, v in checkpoint.items()}
    with replacing(Path(path)) as temporary, durable_file(temporary) as file:
        torch.save(content, file)


def write_weights(weights: Mapping[str, torch.Tensor], path: StrPath) -> None:
    """Write a model's weights as safetensors, whole or not at all.

    The format has no tied weights: each name gets its own copy, which any reader understands.

    :raises OSError: when they cannot be written; the previous file is left as it was
    """
    with replacing(Path(path)) as temporary:
        write_tensors(weights, temporary)


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, tied: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, synced to the disk.

    :param tied: further names for some of them
    """
    separate: dict[str, torch.Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in storages else tensor.contiguous()
        storages.add(storage)
    safetensors.torch.save_file(separate, path, metadata={"format": "pt"} | dict(tied or {}))
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors that are tied under one name each, and the other names with the one that was kept."""
    kept: dict[Any, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        place = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if kept.setdefault(place, name) != name:
            tied[name] = kept[place]
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a temporary file that takes the place of another when the block ends, and is removed when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_checkpoint(path: StrPath) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, without running code from it.

    :raises FileNotFoundError: when there is none
    :raises ValueError: when the file is damaged, is no checkpoint, or holds objects that only code can rebuild
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no checkpoint at {os.fspath(path)!r}.")
    checkpoint = load_plain(Path(path))
    if not isinstance(checkpoint, dict) or "model_state_dict" not in checkpoint:
        raise ValueError(f"The file {os.fspath(path)!r} is no checkpoint: it has no 'model_state_dict'.")
    return checkpoint


def canonical_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state, under the names that it has without ``torch.compile``, whole or in part."""
    state = model.state_dict()
    for key in [key for key in state if _COMPILED in key]:
        state[key.replace(_COMPILED, "")] = state.pop(key)
    return state


def fit_state(model: nn.Module, state: Mapping[str, Any], source: StrPath, strict: bool = True) -> dict[str, Any]:
    """Return weights under the names that the model has for them; nothing is loaded yet.

    Prefixes that wrappers left in the names do not matter.

    :param strict: ``False`` to warn of what does not fit, and to return the rest
    :raises ValueError: when they do not fit; lists missing and unexpected keys and differing shapes
    """
    own = model.state_dict()
    names = {key.replace(_COMPILED, ""): key for key in own}
    state = _without_wrappers(state, names)
    shapes = {
        key: f"{key} (checkpoint {tuple(state[key].shape)}, model {tuple(own[names[key]].shape)})"
        for key in names.keys() & state.keys()
        if _has_shape(own[names[key]]) and state[key].shape != own[names[key]].shape
    }
    problems = [
        _listed("missing in the checkpoint", names.keys() - state.keys()),
        _listed("not in the model", state.keys() - names.keys()),
        _listed("of another shape", shapes.values()),
    ]
    if any(problems):
        text = f"The checkpoint {os.fspath(source)!r} does not fit the model {type(model).__name__}: "
        text += "; ".join(filter(None, problems))
        if strict:
            raise ValueError(
                f"{text}. Build the model as it was when it was saved, or use load_checkpoint(..., strict=False) for "
                "the weights that fit."
            )
        warnings.warn(f"{text}. The rest is loaded.", stacklevel=3)
    return {names[key]: value for key, value in state.items() if key in names and key not in shapes}


def _has_shape(value: Any) -> bool:
    """Whether an entry of a model's state has one: lazy layers have none before their first batch."""
    return isinstance(value, torch.Tensor) and not is_lazy(value)


def _without_wrappers(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Drop what ``torch.compile`` and ``DistributedDataParallel`` put into keys."""
    state = {key.replace(_COMPILED, ""): value for key, value in state.items()}
    stripped = state
    while stripped.keys() != names.keys() and stripped and all(key.startswith(_PARALLEL) for key in stripped):
        stripped = {key.removeprefix(_PARALLEL): value for key, value in stripped.items()}
    fits = stripped.keys() == names.keys() or not any(name.startswith(_PARALLEL) for name in names)
    return stripped if fits else state


def _listed(what: str, keys: Any, most: int = 10) -> str:
    names = sorted(keys)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{what}: {', '.join(names[:most])}{more}" if names else ""
