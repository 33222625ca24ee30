"""Inspect or verify a training state: ``python -m pytorch_accel_lite.checkpoint inspect|verify DIRECTORY``."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

import torch

from pytorch_accel_lite.checkpoint.files import FROZEN, load_plain
from pytorch_accel_lite.checkpoint.training_state import (
    TRAINER,
    DamagedStateError,
    TrainingState,
    read_weights,
    verify_state,
)
from pytorch_accel_lite.utils import format_metric


def inspect(directory: Path) -> None:
    """Print the contents of a training state."""
    manifest = verify_state(directory)
    progress = manifest["progress"]
    saved = datetime.datetime.fromtimestamp(manifest["saved_at"]).isoformat(" ", "seconds")
    print(f"training state {directory}, format {manifest['format_version']}, saved {saved}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()))
    print("progress: " + ", ".join(f"{name} {count}" for name, count in progress.items()))
    print(f"processes: {manifest['world_size']}, seed: {manifest['seed']}, stop reason: {manifest['stop_reason']}")
    shared = load_plain(directory / TRAINER)
    weights = read_weights(TrainingState(directory, manifest, shared, None))
    count = sum(tensor.numel() for tensor in weights.values() if isinstance(tensor, torch.Tensor))
    print(f"weights: {len(weights)} tensors, {count:,} numbers")
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


def main() -> int:
    """Run the command line; the exit code is 1 if the state is not intact."""
    parser = argparse.ArgumentParser(prog="python -m pytorch_accel_lite.checkpoint", description=__doc__)
    parser.add_argument("command", choices=["inspect", "verify"])
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "inspect":
            inspect(arguments.directory)
        else:
            verify_state(arguments.directory)
            print(f"{arguments.directory} is intact")
    except (DamagedStateError, FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
