"""Single-file checkpoints that load anywhere with ``torch.load(path, weights_only=True)``."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

StrPath = str | os.PathLike[str]


def write_checkpoint(checkpoint: Mapping[str, Any], path: StrPath) -> None:
    """Write a checkpoint so that ``path`` holds the old or the new one whole, whenever the process is killed.

    :raises OSError: when it cannot be written; the previous file is left as it was
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(dict(checkpoint), file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_checkpoint(path: StrPath) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, without running code from it.

    :raises FileNotFoundError: when there is none
    :raises ValueError: when the file is no checkpoint of weights, or holds objects that only code can rebuild
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no checkpoint at {os.fspath(path)!r}.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"The file {os.fspath(path)!r} cannot be loaded as a checkpoint: {error}") from error
    if not isinstance(checkpoint, dict) or "model_state_dict" not in checkpoint:
        raise ValueError(f"The file {os.fspath(path)!r} is no checkpoint: it has no 'model_state_dict'.")
    return checkpoint


def load_state_into(model: nn.Module, state: Mapping[str, Any], source: StrPath) -> None:
    """Load weights into a model; prefixes that wrappers left in the keys do not matter.

    :raises ValueError: when they do not fit; lists missing and unexpected keys and differing shapes
    """
    own = model.state_dict()
    state = _without_wrappers(state, own)
    problems = [
        _listed("missing in the checkpoint", own.keys() - state.keys()),
        _listed("not in the model", state.keys() - own.keys()),
        _listed(
            "of another shape",
            [
                f"{key} (checkpoint {tuple(state[key].shape)}, model {tuple(own[key].shape)})"
                for key in own.keys() & state.keys()
                if isinstance(own[key], torch.Tensor) and state[key].shape != own[key].shape
            ],
        ),
    ]
    if any(problems):
        raise ValueError(
            f"The checkpoint {os.fspath(source)!r} does not fit the model {type(model).__name__}: "
            + "; ".join(filter(None, problems))
            + ". Build the model as it was when the checkpoint was saved."
        )
    model.load_state_dict(state)


def _without_wrappers(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what ``torch.compile`` and ``DistributedDataParallel`` put into keys."""
    state = {key.replace("_orig_mod.", ""): value for key, value in state.items()}
    if all(key.startswith("module.") for key in state) and not any(key.startswith("module.") for key in own):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def _listed(what: str, keys: Any, most: int = 10) -> str:
    names = sorted(keys)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{what}: {', '.join(names[:most])}{more}" if names else ""
