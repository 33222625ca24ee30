"""Comparing the training states of two runs, to find where they first differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytorch_accel_lite.checkpoint.training_state import (
    MANIFEST,
    open_state,
    read_weights,
    restore_whole_tensors,
    verify_state,
)


def compare(first: Path, second: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each state that two runs have in common, and what differs in it, up to the first difference.

    :param first: the directory of a state, or one that holds the states of a run
    :param second: the same of another run
    :raises FileNotFoundError: if they have no state in common
    """
    if (first / MANIFEST).exists() and (second / MANIFEST).exists():
        yield second.name, differences(first, second)
        return
    names = [{path.parent.name for path in directory.glob(f"[!.]*/{MANIFEST}")} for directory in (first, second)]
    common = sorted(set.intersection(*names))
    if not common:
        raise FileNotFoundError(f"{str(first)!r} and {str(second)!r} have no training state of the same name.")
    for name in common:
        found = differences(first / name, second / name)
        yield name, found
        if found:
            return


def differences(first: Path, second: Path) -> list[str]:
    """Return descriptions of what differs between two training states, to the last bit: weights first.

    :raises DamagedStateError: if one of them is damaged
    """
    return list(_differences(_content(first), _content(second), ""))


def _content(directory: Path) -> dict[str, Any]:
    manifest = verify_state(directory)
    state = open_state(directory, manifest)
    restore_whole_tensors(state)
    shared = state.shared
    stored = read_weights(state)
    weights = dict(sorted(stored.items(), key=lambda item: (_counts(item[1]), item[0])))
    kept = {name: value for name, value in shared.items() if name not in ("model_extra", "extra")}
    return {"weights": weights, "progress": manifest["progress"], **kept}


def _counts(value: Any) -> bool:
    """Whether it is a tensor of counts, which differ after another number of updates anyway, and so come last."""
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _differences(first: Any, second: Any, path: str) -> Iterator[str]:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if description := _difference(first, second):
            yield f"{path}: {description}"
    elif isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in [*first, *(name for name in second if name not in first)]:
            where = f"{path}/{name}" if path else str(name)
            if name in first and name in second:
                yield from _differences(first[name], second[name], where)
            else:
                yield f"{where}: only in the {'first' if name in first else 'second'}"
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        for place, pair in enumerate(zip(first, second, strict=True)):
            yield from _differences(*pair, f"{path}/{place}")
    elif repr(first) != repr(second):  # in which NaN equals NaN
        yield f"{path}: {_shortened(first)} and {_shortened(second)}"


def _difference(first: torch.Tensor, second: torch.Tensor) -> str:
    """Describe how two tensors differ; empty if they have the same bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)}"
    bits = [tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (first, second)]
    count = int((bits[0] != bits[1]).any(1).sum())
    if not count:
        return ""
    largest = (first.double() - second.double()).abs().max().item()
    return f"{count} of {first.numel()} elements differ, by at most {largest:.3g}"


def _shortened(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
