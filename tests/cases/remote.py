"""Training states of several processes in a remote store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.cases.common import rank
from tests.faulty_store import FaultyStore
from tests.scripts.resumable import run


def resumed(folder: Path) -> Any:
    """A whole run, and one that ends after an epoch and is resumed: each machine has its own copy of the state."""
    FaultyStore.reset()
    url = f"faulty://{folder}/states"
    folder.mkdir(exist_ok=True)
    kwargs = {"schedule": False, "save_every_n_steps": 2}
    whole = run(folder / "whole", **kwargs)
    run(folder, epochs=1, save_dir=url, asynchronous=True, **kwargs)
    return whole, run(folder, save_dir=url, max_checkpoints=2, **kwargs)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES = {"flipped": _flip, "truncated": _truncate, "deleted": Path.unlink}


def sharded_and_damaged(folder: Path, thoroughly: bool) -> tuple[Any, dict[str, Any]]:
    """A run that saves its states in shards, and runs that find its last one damaged, by address of what is damaged.

    :param thoroughly: each file in each way, rather than each in one
    """
    kwargs = {"schedule": False, "sharded": True, "asynchronous": True, "epochs": 1}
    FaultyStore.reset()
    folder.mkdir(exist_ok=True)
    whole = run(folder, save_dir=f"faulty://{folder}/states", **kwargs)
    files = sorted(path for path in (folder / "states" / "update-000000004").rglob("*") if path.is_file())
    resumed = {}
    for place, file in enumerate(files):
        for how in DAMAGES if thoroughly else [[*DAMAGES][(place + 2) % 3]]:
            there = folder / f"{how}-{file.name}"
            if rank() == 0:
                shutil.copytree(folder / "states", there / "states")
                DAMAGES[how](there / file.relative_to(folder))
            dist.barrier()
            address = f"faulty://{there}/states/update-000000004/{file.name}"
            resumed[address] = run(there, save_dir=f"faulty://{there}/states", **kwargs)
    return whole, resumed
