"""How a process joins a run that others have begun: it resumes from a state that they save for it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

from accelerate.state import PartialState

from pytorch_accel_lite.extending import Run, TrainerLike
from pytorch_accel_lite.extensions.takeover.job_store import Generation, Key
from pytorch_accel_lite.extensions.takeover.membership import BeginAgain, Membership, change_state

_IN_MEMORY = Path("/dev/shm")
_POLLING = 0.005


def stay_apart() -> None:
    """Let this process run its program alone until it joins the others, without writing what their first one writes."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    change_state(vars(PartialState(cpu=True)), rank=1, local_rank=1, world_size=1)


def wait_for_state(membership: Membership) -> str:
    """Return the state from which this process joins the others, or that with which they have ended this training.

    Raises:
        SystemExit: if they end
    """
    store, number, training = membership.store, membership.number, membership.trainings
    store.say(Key.READY, str(training), number)
    while True:
        if (said := store.said(Key.STATE, number)) is not None:
            membership.joins, is_near, directory = json.loads(said)
            return str(directory) if is_near else _fetch(membership, Key.SENT, number, membership.joins)
        if store.said(Key.ENDED, training) is not None:
            return _fetch(membership, Key.ENDED, training)
        if store.said(Key.ENDING) is not None:
            raise SystemExit(f"Process {number} ends: the others have reached the end of the program.")
        time.sleep(_POLLING)


def _fetch(membership: Membership, key: Key, *numbers: int) -> str:
    membership.fetched = temporary_folder()
    membership.store.get_folder(key, membership.fetched.name, *numbers)
    return membership.fetched.name


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory, where there is one."""
    return tempfile.TemporaryDirectory(dir=memory_folder(), ignore_cleanup_errors=True)


def memory_folder() -> Path:
    """Return the folder for temporary files in memory, where there is one."""
    return _IN_MEMORY if _IN_MEMORY.is_dir() else Path(tempfile.gettempdir())


def let_in(trainer: TrainerLike, run: Run, membership: Membership) -> None:
    """Save a state for the processes that come, between two updates, and enter their generation with them.

    Those that have yet to follow the trainings before this one are let in later.
    """
    generation = membership.generation
    assert generation is not None
    membership.begun_at = time.monotonic()
    ranks, store = trainer.ranks, membership.store
    follows = ranks.broadcast_object(store.latest)
    if not ranks.broadcast_object(lambda: _are_ready(follows, membership)):
        return
    with temporary_folder() as own:
        folder = ranks.broadcast_object(lambda: own)
        if follows.came:
            directory = os.path.join(folder, "state")
            run.window.filled, run.window.is_in_step = 0, False
            trainer.save_training_state(directory)
            machines = dict(zip(follows.members, follows.machines, strict=True))
            tells = membership.rank == 0 and membership.generation is generation
            for newcomer in follows.came if tells else ():
                is_near = machines[newcomer] == machines[membership.number]
                if not is_near:
                    store.put_folder(Key.SENT, directory, newcomer, follows.number)
                store.say(Key.STATE, json.dumps([follows.number, is_near, directory]), newcomer)
        if generation.number < follows.number and membership.generation is generation:  # no process has been lost
            enter(run, membership)
        for newcomer in follows.came if membership.rank == 0 else ():
            store.drop_folder(Key.SENT, newcomer, follows.number)


def let_in_by_beginning_again(trainer: TrainerLike, run: Run, membership: Membership) -> None:
    """Save a state of a sharded run for all processes, with which they and those that come begin again.

    Raises:
        BeginAgain: if there are others, on the same machine
    """
    ranks, store = trainer.ranks, membership.store
    follows = ranks.broadcast_object(store.latest)
    are_near = len(set(follows.machines)) == 1
    if not (follows.came and are_near and ranks.broadcast_object(lambda: _are_ready(follows, membership))):
        return
    membership.made = ranks.broadcast_object(lambda: tempfile.mkdtemp(dir=memory_folder()))
    directory = os.path.join(membership.made, "state")
    run.window.filled, run.window.is_in_step = 0, False
    trainer.save_training_state(directory)
    for newcomer in follows.came if membership.rank == 0 else ():
        store.say(Key.STATE, json.dumps([follows.number, True, directory]), newcomer)
    membership.resumes_from, membership.begins_again = directory, True
    raise BeginAgain


def _are_ready(follows: Generation, membership: Membership) -> bool:
    training = str(membership.trainings)
    return all(membership.store.said(Key.READY, newcomer) == training for newcomer in follows.came)


def keep_end(trainer: TrainerLike, membership: Membership) -> None:
    """Keep the state with which a training has ended for processes that come during a later one."""

    def keep() -> None:
        with temporary_folder() as own:
            directory = os.path.join(trainer.ranks.broadcast_object(lambda: own), "state")
            trainer.save_training_state(directory)
            if membership.rank == 0:
                membership.store.put_folder(Key.ENDED, directory, membership.trainings)
            trainer.ranks.barrier()

    trainer.ranks.repeatable(keep)


def enter(run: Run, membership: Membership) -> None:
    """Enter the generation that follows, to which this process belongs, or which it has waited for."""
    membership.disconnect()
    membership.join(membership.joins)
    try:
        membership.agree()
        membership.tell_of_change(membership.begun_at)
    except RuntimeError as error:
        membership.recover(error)
    run.control.realign()
