"""How a process joins a running job: it resumes from a state that the members save for it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

from accelerate.state import PartialState

from pytorch_accel_lite.extending import Run, TrainerLike
from pytorch_accel_lite.extensions.takeover.job_store import Generation, Key
from pytorch_accel_lite.extensions.takeover.membership import Membership, change_state
from pytorch_accel_lite.extensions.takeover.restart import ProgramRestart

_IN_MEMORY = Path("/dev/shm")
_POLLING = 0.005


def run_alone() -> None:
    """Run the program of this process alone until it joins the job, with rank 1 so that it writes no files."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    change_state(vars(PartialState(cpu=True)), rank=1, local_rank=1, world_size=1)


def wait_for_state(membership: Membership) -> str:
    """Wait for the state from which this process joins, or the final state if this training is over, and return it.

    Raises:
        SystemExit: if the job ends
    """
    store, number, training = membership.store, membership.number, membership.trainings
    store.put(Key.READY, str(training), number)
    while True:
        if (said := store.get(Key.STATE, number)) is not None:
            membership.joins, is_near, directory = json.loads(said)
            return str(directory) if is_near else _fetch(membership, Key.SENT, number, membership.joins)
        if store.get(Key.ENDED, training) is not None:
            return _fetch(membership, Key.ENDED, training)
        if store.get(Key.ENDING) is not None:
            raise SystemExit(f"Process {number} ends: the others have reached the end of the program.")
        time.sleep(_POLLING)


def _fetch(membership: Membership, key: Key, *numbers: int) -> str:
    membership.fetched = temporary_folder()
    membership.store.get_folder(key, membership.fetched.name, *numbers)
    return membership.fetched.name


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder in memory if possible, else on disk."""
    return tempfile.TemporaryDirectory(dir=memory_folder(), ignore_cleanup_errors=True)


def memory_folder() -> Path:
    """Return ``/dev/shm`` if it exists, else the folder for temporary files."""
    return _IN_MEMORY if _IN_MEMORY.is_dir() else Path(tempfile.gettempdir())


def admit(trainer: TrainerLike, run: Run, membership: Membership) -> None:
    """Admit new processes between two updates: save a state for them, and enter the new generation with them.

    Newcomers whose program has not reached this training yet are admitted later.
    """
    membership.begun_at = time.monotonic()
    ranks, store = trainer.ranks, membership.store
    follows = ranks.result_of_first(store.latest)
    generation = membership.generation  # the same on all, unless all find that it is not followed by that one
    assert generation is not None
    if not ranks.result_of_first(lambda: _are_ready(follows, membership)):
        return
    with temporary_folder() as own:
        directory = os.path.join(ranks.result_of_first(lambda: own), "state")
        if follows.came:
            run.window.filled, run.window.is_in_step = 0, False
            trainer.save_training_state(directory)
        if generation.number < follows.number and membership.generation is generation:  # no process was lost meanwhile
            machines = dict(zip(follows.members, follows.machines, strict=True))
            for newcomer in follows.came if membership.rank == 0 else ():
                is_near = machines[newcomer] == machines[membership.number]
                if not is_near:
                    store.put_folder(Key.SENT, directory, newcomer, follows.number)
                store.put(Key.STATE, json.dumps([follows.number, is_near, directory]), newcomer)
            enter(run, membership)
        for newcomer in follows.came if membership.rank == 0 else ():
            store.drop_folder(Key.SENT, newcomer, follows.number)


def admit_by_restart(trainer: TrainerLike, run: Run, membership: Membership) -> None:
    """Admit new processes to a sharded run: save a state, from which the program of all processes restarts.

    Raises:
        ProgramRestart: if there are newcomers, and all processes are on one machine
    """
    ranks, store = trainer.ranks, membership.store
    follows = ranks.result_of_first(store.latest)
    are_near = len(set(follows.machines)) == 1
    if not (follows.came and are_near and ranks.result_of_first(lambda: _are_ready(follows, membership))):
        return
    restart = membership.restart
    restart.folder = ranks.result_of_first(lambda: tempfile.mkdtemp(dir=memory_folder()))
    directory = os.path.join(restart.folder, "state")
    run.window.filled, run.window.is_in_step = 0, False
    trainer.save_training_state(directory)
    for newcomer in follows.came if membership.rank == 0 else ():
        store.put(Key.STATE, json.dumps([follows.number, True, directory]), newcomer)
    restart.state = directory
    restart.request(has_entered=False)
    raise ProgramRestart


def _are_ready(follows: Generation, membership: Membership) -> bool:
    training = str(membership.trainings)
    return all(membership.store.get(Key.READY, newcomer) == training for newcomer in follows.came)


def save_final_state(trainer: TrainerLike, membership: Membership) -> None:
    """Store the final state of a training for processes that join during a later one."""

    def keep() -> None:
        with temporary_folder() as own:
            directory = os.path.join(trainer.ranks.result_of_first(lambda: own), "state")
            trainer.save_training_state(directory)
            if membership.rank == 0:
                membership.store.put_folder(Key.ENDED, directory, membership.trainings)
            trainer.ranks.barrier()

    trainer.ranks.repeat_if_process_lost(keep)


def enter(run: Run, membership: Membership) -> None:
    """Enter the next generation, of which this process is a member."""
    membership.join(membership.joins)
    membership.announce_change(membership.begun_at)
    run.control.realign()
