"""How a process joins a run that others have begun: it resumes from a state that they save for it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from accelerate.state import PartialState

from pytorch_accel_lite.extending import Run, TrainerLike
from pytorch_accel_lite.extensions.takeover.membership import Membership, change_state

_IN_MEMORY = Path("/dev/shm")
_POLLING = 0.005


def stay_apart() -> None:
    """Let this process run its program alone until it joins the others, without writing what their first one writes."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    change_state(vars(PartialState(cpu=True)), rank=1, world_size=1)


def wait_for_state(membership: Membership) -> str:
    """Return the state from which this process joins the others, once they have saved it."""
    membership.store.say(f"ready/{membership.number}")
    while (said := membership.store.said(f"state/{membership.number}")) is None:
        time.sleep(_POLLING)
    membership.joins, directory = json.loads(said)
    return str(directory)


def let_in(trainer: TrainerLike, run: Run, membership: Membership) -> None:
    """Save a state for the processes that come, between two updates, and enter their generation with them."""
    assert membership.generation is not None
    membership.begun_at = time.monotonic()
    ranks, store = trainer.ranks, membership.store
    follows = ranks.broadcast_object(store.latest)
    folder = ranks.broadcast_object(lambda: tempfile.mkdtemp(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None))
    try:
        if follows.came:
            directory = os.path.join(folder, "state")
            run.window.filled, run.window.is_in_step = 0, False
            trainer.save_training_state(directory)
            for newcomer in follows.came if membership.rank == 0 else ():
                store.say(f"state/{newcomer}", json.dumps([follows.number, directory]))
        if membership.generation.number < follows.number:  # no process has been lost meanwhile
            enter(run, membership)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
