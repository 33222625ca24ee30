"""Inspect, verify or compare training states: ``python -m pytorch_accel_lite.checkpoint inspect DIRECTORY``.

``verify DIRECTORY`` checks whether a state is intact. ``diff FIRST SECOND`` compares two states, or two directories of
states, and tells where the runs first differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytorch_accel_lite.checkpoint.files import parse_location
from pytorch_accel_lite.checkpoint.manifest import MANIFEST, DamagedStateError, verify_state
from pytorch_accel_lite.checkpoint.remote import local_copy
from pytorch_accel_lite.checkpoint.summary import print_contents
from pytorch_accel_lite.checkpoint.training_state import open_state

_SHOWN = 10


def diff(first: Path, second: Path) -> int:
    """Print where two states, or the states of two runs, first differ to the last bit. Return 1 if they do.

    :param first: the directory of a state, or one that holds the states of a run
    :param second: the same of another run
    :raises FileNotFoundError: if they have no state in common
    :raises DamagedStateError: if a state is damaged
    """
    folders = (first, second)
    pairs = {second.name: folders}
    if not all((folder / MANIFEST).exists() for folder in folders):
        names = [{path.parent.name for path in folder.glob(f"[!.]*/{MANIFEST}")} for folder in folders]
        pairs = {name: (first / name, second / name) for name in sorted(set.intersection(*names))}
    if not pairs:
        raise FileNotFoundError(f"{str(first)!r} and {str(second)!r} have no training state of the same name.")
    identical: list[str] = []
    for name, (one, other) in pairs.items():
        differences = list(_differences(_content(one), _content(other), ""))
        if differences:
            earlier = f", after {identical[-1]}, which is the same" if identical else ""
            print(f"{name} differs{earlier}:")
            print("\n".join(f"  {difference}" for difference in differences[:_SHOWN]))
            if len(differences) > _SHOWN:
                print(f"  and {len(differences) - _SHOWN} more")
            return 1
        identical.append(name)
    print(f"the same to the last bit: {', '.join(identical)}")
    return 0


def _content(directory: Path) -> dict[str, Any]:
    manifest = verify_state(directory)
    state = open_state(directory, manifest)
    state.read_tensors()
    weights = sorted(state.read_weights().items(), key=lambda item: (_is_count(item[1]), item[0]))
    shared = {name: value for name, value in state.shared.items() if name not in ("model_extra", "extra")}
    return {"weights": dict(weights), "progress": manifest["progress"], **shared}


def _is_count(value: Any) -> bool:
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
        for index, pair in enumerate(zip(first, second, strict=True)):
            yield from _differences(*pair, f"{path}/{index}")
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


def main() -> int:
    """Run the command line; the exit code is 1 if the state is not intact, or if states differ."""
    parser = argparse.ArgumentParser(prog="python -m pytorch_accel_lite.checkpoint", description=__doc__)
    parser.add_argument("command", choices=["inspect", "verify", "diff"])
    parser.add_argument(
        "directory", type=parse_location, help="directory or URL of the state; diff takes directories only"
    )
    parser.add_argument("other", type=Path, nargs="?", help="the state or states to compare with, for diff")
    arguments = parser.parse_args()
    if (arguments.command == "diff") != (arguments.other is not None):
        parser.error("diff compares two directories; the other commands take one")
    try:
        if arguments.command == "diff":
            if isinstance(arguments.directory, str):
                parser.error("diff compares directories: fetch the states from the remote store first")
            return diff(arguments.directory, arguments.other)
        if arguments.command == "inspect":
            print_contents(arguments.directory)
        else:
            with local_copy(arguments.directory) as directory:
                verify_state(directory)
            print(f"{arguments.directory} is intact")
    except (DamagedStateError, FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
