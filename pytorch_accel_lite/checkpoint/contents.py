"""What a training state contains, in words."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch

from pytorch_accel_lite.base.text import format_metric
from pytorch_accel_lite.checkpoint.files import FROZEN, place
from pytorch_accel_lite.checkpoint.locations import local_copy
from pytorch_accel_lite.checkpoint.training_state import (
    MODEL,
    TENSORS,
    open_state,
    read_weights,
    stored_checksum,
    verify_state,
)


def print_contents(state: Path | str) -> None:
    """Print the contents of a training state.

    :param state: its directory, or its URL in a remote store
    """
    with local_copy(place(state)) as directory:
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
