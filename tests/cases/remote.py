"""Training states of several processes in a remote store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
