"""The contents of a training state as text, and the training states in a folder."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch

from pytorch_accel_lite.extension_tools.arguments_and_errors import parse_location
from pytorch_accel_lite.extension_tools.plain_types import JsonObject, StrPath
from pytorch_accel_lite.extension_tools.states_and_files import (
    DIVISIONS,
    LEFT_OUT,
    MANIFEST,
    MODEL,
    DamagedStateError,
    local_copy,
    open_state,
    read_manifest,
    read_weights,
    stored_checksum,
    verify_state,
)
from pytorch_accel_lite.extension_tools.texts_and_pages import format_metric


def _states_in(folder: Path) -> list[str]:
    """Return a line for each training state in a folder and its subfolders, in the order in which they were saved."""
    paths = [path.parent for depth in ("*", "*/*", "*/*/*") for path in folder.glob(f"{depth}/{MANIFEST}")]
    manifests, damaged = [], []
    for path in paths:
        try:
            manifests.append((read_manifest(path), path))
        except DamagedStateError as error:
            damaged.append(str(error))
    lines = []
    for manifest, path in sorted(manifests, key=lambda pair: pair[0]["saved_at"]):
        progress = manifest["progress"]
        lines.append(f"{path}: epoch {progress['epoch']}, update {progress['update']:,}, saved {_saved(manifest)}")
    return lines + damaged


def _saved(manifest: JsonObject) -> str:
    return datetime.datetime.fromtimestamp(manifest["saved_at"]).isoformat(" ", "seconds")


def print_contents(state: StrPath) -> None:
    """Print the contents of a training state, or list the states in a folder.

    Args:
        state: the directory of the state, or its URL in a remote store; or a folder of states, of a run, or of runs
    """
    location = parse_location(state, "state")
    if isinstance(location, Path) and not (location / MANIFEST).exists() and (lines := _states_in(location)):
        print("\n".join(lines))
        return
    with local_copy(location) as directory:
        manifest = verify_state(directory)
        opened = open_state(directory, manifest)
        weights = read_weights(opened)
    shared = opened.shared
    print(f"training state {os.fspath(state)}, format {manifest['format_version']}, saved {_saved(manifest)}")
    for title in ("versions", "progress", "machine"):
        print(f"{title}: " + ", ".join(f"{name} {value}" for name, value in manifest.get(title, {}).items()))
    print(f"processes: {manifest['world_size']}, seed: {manifest['seed']}, stop reason: {manifest['stop_reason']}")
    for name in filter(manifest.get, DIVISIONS):
        print(f"{name.replace('_', ' ')}: {manifest[name]}")
    count = sum(tensor.numel() for tensor in weights.values() if isinstance(tensor, torch.Tensor))
    checksum = stored_checksum(manifest["files"][MODEL])[:16]
    print(f"weights: {len(weights)} tensors, {count:,} numbers, checksum {checksum}")
    if in_shards := [name for name in manifest["files"] if name.startswith("shards")]:
        print(f"in shards: tensors of the weights, the optimizer and the callbacks, in {len(in_shards)} files")
    if left_out := shared.get(LEFT_OUT):
        print(f"left out: {len(left_out)} frozen tensors, which the resumed program must create itself")
    print("also: " + ", ".join(name for name in ("optimizer", "scheduler", "scaler") if shared[name] is not None))
    for title in ("attributes", "callbacks", "objects", "extra"):
        if shared.get(title):
            print(f"{title}: {', '.join(shared[title])}")
    held = shared.get("user_attributes", {}).get("kept", {})
    print("".join(f"held by {owner or 'the trainer'}: {', '.join(names)}\n" for owner, names in held.items()), end="")
    for name, values in (shared["history"] or {"metrics": {}})["metrics"].items():
        print(f"  {name}: {', '.join(map(format_metric, values[-5:]))}")
    for name, entry in manifest["files"].items():
        print(f"  {entry['size']:>12,} bytes  {name}")
