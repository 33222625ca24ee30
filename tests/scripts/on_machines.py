"""A run on several "machines" that share only an object store: torchrun ... on_machines.py FOLDER [DELAY]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import tests.faulty_store  # noqa: F401  the store faulty://, which every machine can reach
from pytorch_accel_lite.callbacks import HangWatchCallback
from tests.scripts.resumable import run_to_the_end


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    delay = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    watch = HangWatchCallback(5, end=True)  # a machine that is cut off would leave its peers waiting for half an hour
    saving = {"save_dir": f"faulty://{folder}/states", "extra": (watch,)}
    run_to_the_end(folder, delay=delay, epochs=4, schedule=False, batch=3, size=24, **saving)


if __name__ == "__main__":
    main()
