"""Kill a run at random instants, restart it until it ends, and compare it with an uninterrupted run.

python -m tests.soak [--kills 100] [--processes 1] [--logical 4] [--workers 0] [--asynchronous] [--sharded-remotely]
    [--held]

A state is saved at every update. Exits with an error if the killed run ends in other bits. With logical processes, each
restart has a random number of real ones. Sharded remotely, weights and states are sharded over the processes and the
states are in a remote store; each kill hits one of the processes or all of them.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.faulty_store import FaultyStore
from tests.launching import EarlyCopy, EarlyFork, Fork, run_elastic
from tests.scripts.resumable import Lingers, run_to_the_end

_PATIENCE = 3600
_UPDATES_FOR_A_KILL = 3  # an epoch, or less


def soak(
    folder: Path,
    kills: int,
    processes: int = 1,
    workers: int = 0,
    asynchronous: bool = False,
    logical: int | None = None,
    sharded_remotely: bool = False,
    evaluate_every: str | None = None,
    run_whole: Callable[..., None] | None = None,
    held: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of the killed and of the uninterrupted run; fails unless all kills happened.

    Args:
        run_whole: runs without kills, if its processes exist already
        held: train a head in a closure, hold data in attributes, and unfreeze a layer
    """
    options: dict[str, Any] = {"workers": workers, "epochs": max(3, kills + 1), "asynchronous": asynchronous}
    options |= {"evaluate_every": evaluate_every, "held": held}
    if logical is not None:
        options |= {"logical": logical, "batch": 2}
    generator = torch.Generator().manual_seed(0)

    def start(target: Path, is_to_end: bool) -> Fork:
        lingers = Lingers(None if is_to_end else _update_of(_newest(target)) + _UPDATES_FOR_A_KILL)
        slowly = {"delay": 0.0 if is_to_end else 0.05, "extra": (lingers,)}
        run = partial(run_to_the_end, target, **slowly, **options, **_saver(target, sharded_remotely))
        count = processes if logical is None else int(torch.randint(1, logical + 1, (), generator=generator))
        return EarlyFork(run if count == 1 else partial(run_elastic, count, run), folder / "output")

    is_job = processes > 1 or logical is not None
    whole, killed = folder / "whole", folder / "killed"
    for target in (whole, killed):
        target.mkdir()
    if run_whole is None:
        assert start(whole, True).wait(_PATIENCE) == 0, (folder / "output").read_text()
    else:
        run_whole(whole, **options, **_saver(whole, sharded_remotely))
    done = 0
    while not (killed / "final.pt").exists():
        process = start(killed, is_to_end=done == kills)
        was_killed = done < kills and _kill_after_a_state(process, killed, generator, is_job, sharded_remotely)
        done += was_killed
        codes = (0, -signal.SIGKILL, 1) if was_killed else (0,)  # a launcher that lost a rank exits with 1
        assert process.wait(_PATIENCE) in codes, (folder / "output").read_text()
    assert done == kills, f"{done} kills instead of {kills}"
    return tuple(torch.load(target / "final.pt", weights_only=False) for target in (killed, whole))


def _saver(folder: Path, sharded_remotely: bool) -> dict[str, Any]:
    """Return arguments to save states in ``folder / "states"``, optionally in shards in the tests' remote store."""
    if not sharded_remotely:
        return {}
    return {"sharded": True, "max_checkpoints": 2, "save_dir": f"{FaultyStore.protocol}://{folder}/states"}


def _update_of(state: str) -> int:
    """The number of the update in the name of a state; 0 for none."""
    return int(state.rpartition("-")[2] or 0)


def _newest(folder: Path) -> str:
    """The name of the last complete state of a run."""
    return max((path.parent.name for path in folder.glob("states/update-*/manifest.json")), default="")


def _kill_after_a_state(process: Fork, folder: Path, generator: torch.Generator, is_job: bool, one_rank: bool) -> bool:
    """Kill a run some time after its next state; return whether it was still alive.

    Args:
        is_job: also wait for its ranks to end; data workers may live for seconds after any kill
        one_rank: kill only one of its processes half of the time; the launcher then ends the others
    """
    before = _newest(folder)
    while process.poll() is None and _newest(folder) == before:
        time.sleep(0.005)
    time.sleep(torch.rand(1, generator=generator).item() * 0.1)
    is_alive = process.poll() is None
    ranks = psutil.Process(process.pid).children(recursive=True) if is_alive and is_job else []
    victim = int(torch.randint(2 * len(ranks), (), generator=generator)) if one_rank and ranks else len(ranks)
    if victim < len(ranks):
        with suppress(psutil.NoSuchProcess):
            ranks[victim].kill()
        process.wait(_PATIENCE)
    process.kill()
    psutil.wait_procs(ranks, timeout=60)  # ranks die with their launcher, with a delay on a busy machine
    return is_alive


def main() -> None:
    from tests.small_models import assert_same

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--logical", type=int)
    parser.add_argument("--sharded-remotely", action="store_true")
    parser.add_argument("--held", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    EarlyFork.copy = EarlyCopy()
    with tempfile.TemporaryDirectory() as folder, closing(EarlyFork.copy):
        assert_same(*soak(Path(folder), **vars(arguments)))
    print(f"{arguments.kills} kills: the same bits as the whole run")


if __name__ == "__main__":
    main()
