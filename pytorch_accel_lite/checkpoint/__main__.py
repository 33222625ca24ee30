"""Inspect, verify or compare training states: ``python -m pytorch_accel_lite.checkpoint inspect DIRECTORY``.

``verify DIRECTORY`` checks whether a state is intact. ``diff FIRST SECOND`` compares two states, or two directories of
states, and tells where the runs first differ.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path

import torch

from pytorch_accel_lite.base.text import format_metric
from pytorch_accel_lite.checkpoint.comparison import compare
from pytorch_accel_lite.checkpoint.files import FROZEN, place
from pytorch_accel_lite.checkpoint.locations import local_copy
from pytorch_accel_lite.checkpoint.training_state import (
    MODEL,
    TENSORS,
    DamagedStateError,
    open_state,
    read_weights,
    stored_checksum,
    verify_state,
)

_SHOWN = 10


def inspect(state: Path | str) -> None:
    """Print the contents of a training state.

    :param state: its directory, or its URL in a remote store
    """
    with local_copy(state) as directory:
        _describe(os.fspath(state), directory)


def _describe(name: str, directory: Path) -> None:
    manifest = verify_state(directory)
    progress = manifest["progress"]
    saved = datetime.datetime.fromtimestamp(manifest["saved_at"]).isoformat(" ", "seconds")
    print(f"training state {name}, format {manifest['format_version']}, saved {saved}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()))
    print("progress: " + ", ".join(f"{name} {count}" for name, count in progress.items()))
    print(f"processes: {manifest['world_size']}, seed: {manifest['seed']}, stop reason: {manifest['stop_reason']}")
    if manifest.get("logical_processes"):
        print(f"logical processes: {manifest['logical_processes']}")
    print("machine: " + ", ".join(f"{name} {value}" for name, value in manifest.get("machine", {}).items()))
    state = open_state(directory, manifest)
    shared = state.shared
    weights = read_weights(state)
    count = sum(tensor.numel() for tensor in weights.values() if isinstance(tensor, torch.Tensor))
    checksum = stored_checksum(manifest["files"][MODEL])[:16]
    print(f"weights: {len(weights)} tensors, {count:,} numbers, checksum {checksum}")
    in_shards = [name for name, pieces in state.pieces.items() if pieces[0].path.name != TENSORS]
    if in_shards:
        print(f"in shards: {len(in_shards)} tensors of the weights, the optimizer and the callbacks")
    if left_out := shared.get(FROZEN):
        print(f"left out: {len(left_out)} frozen tensors, which the program that resumes must create itself")
    held = [name for name in ("optimizer", "scheduler", "scaler") if shared[name] is not None]
    print(f"also: {', '.join(held)}")
    for title in ("attributes", "callbacks", "objects", "extra"):
        if shared.get(title):
            print(f"{title}: {', '.join(shared[title])}")
    for name, values in (shared["history"] or {"metrics": {}})["metrics"].items():
        print(f"  {name}: {', '.join(map(format_metric, values[-5:]))}")
    for name, entry in manifest["files"].items():
        print(f"  {entry['size']:>12,} bytes  {name}")


def diff(first: Path, second: Path) -> int:
    """Print where two states, or the states of two runs, first differ. Return 1 if they do."""
    same: list[str] = []
    for name, found in compare(first, second):
        if found:
            earlier = f", after {same[-1]}, which is the same" if same else ""
            print(f"{name} differs{earlier}:")
            print("\n".join(f"  {difference}" for difference in found[:_SHOWN]))
            if len(found) > _SHOWN:
                print(f"  and {len(found) - _SHOWN} more")
            return 1
        same.append(name)
    print(f"the same to the last bit: {', '.join(same)}")
    return 0


def main() -> int:
    """Run the command line; the exit code is 1 if the state is not intact, or if states differ."""
    parser = argparse.ArgumentParser(prog="python -m pytorch_accel_lite.checkpoint", description=__doc__)
    parser.add_argument("command", choices=["inspect", "verify", "diff"])
    parser.add_argument("directory", type=place, help="directory or URL of the state; diff takes directories only")
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
            inspect(arguments.directory)
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
