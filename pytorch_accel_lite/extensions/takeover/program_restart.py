"""How a sharded run continues after the loss of a process: the program restarts, in the same processes, from a state.

Torch cannot reshard a live model. If other processes hold replicas of the lost shards, they save a state for the
restart; otherwise, the latest training state is used.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import cast

from accelerate.state import AcceleratorState, GradientState, PartialState

from pytorch_accel_lite.extending import TrainerLike
from pytorch_accel_lite.extension_tools.processes import open_trainers, use_holders
from pytorch_accel_lite.extensions.logical import LogicalProcesses
from pytorch_accel_lite.extensions.takeover.joining_processes import wait_for_state
from pytorch_accel_lite.extensions.takeover.membership import Membership
from pytorch_accel_lite.extensions.takeover.restart import ProgramRestart

_MANIFEST = "manifest.json"
#: When each state was saved, by its folder.
States = dict[str, float]


def has_sharded_trainer() -> bool:
    """Whether the weights of some trainer are sharded, so that losing a process loses weights."""
    trainers = cast(list[TrainerLike], open_trainers())
    return any(trainer.is_sharded and isinstance(trainer.division, LogicalProcesses) for trainer in trainers)


def states_of(trainer: TrainerLike) -> States:
    """Return the complete states in the folders to which a run saves them."""
    found: States = {}
    for source in trainer.current_run.request.state_sources:
        folder = Path(str(getattr(source, "save_dir", "")))
        for manifest in folder.glob(f"*/{_MANIFEST}"):
            with suppress(OSError, ValueError, KeyError):  # it is being replaced
                found[str(manifest.parent)] = float(json.loads(manifest.read_text())["saved_at"])
    return found


def note_existing_states(trainer: TrainerLike, membership: Membership) -> None:
    """At the beginning of a training, note which states exist that this job has not saved."""
    if membership.states_of_others is None:
        membership.states_of_others = states_of(trainer)
    membership.states = lambda: states_of(trainer)


def newest_state(membership: Membership) -> str | None:
    """Return the newest state that this job has saved during the interrupted training."""
    others = membership.states_of_others or {}
    own = {folder: saved_at for folder, saved_at in membership.states().items() if others.get(folder) != saved_at}
    return max(own, key=lambda folder: own[folder]) if own else None


def join_sharded(membership: Membership) -> None:
    """Join a sharded run that is already under way, before the program of this process starts."""
    membership.trainings = 1
    membership.restart.state = wait_for_state(membership)
    membership.reset()
    membership.join(membership.joins)


def restart_program(membership: Membership) -> None:
    """Discard what the program has created, and enter the next generation."""
    restart = membership.restart
    if restart.saves_first:
        _save_state(membership)
    loses_nothing = restart.state is not None and Path(restart.state, _MANIFEST).exists()  # its creator may be lost
    if not loses_nothing:
        restart.state = newest_state(membership)
    trainers = cast(list[TrainerLike], open_trainers())
    for trainer in trainers:
        trainer.close()
    for kind in (AcceleratorState, GradientState, PartialState):
        shared = vars(kind)["_shared_state"]
        getattr(shared, "_storage", shared).clear()
    membership.reset()
    use_holders(None)
    if not restart.has_entered:
        membership.join()
    restart.has_entered = False
    if membership.rank == 0 and not loses_nothing:
        restart.remove_folder()  # saving the state was interrupted
        where = "the beginning: no state had been saved" if restart.state is None else repr(restart.state)
        print(f"The weights were sharded, and a lost process had some of them. All begin again from {where}.")


def _save_state(membership: Membership) -> None:
    """Save the state at the end of the training from the remaining shards."""
    assert membership.shards is not None
    membership.restart.is_due = membership.is_in_action = False
    with suppress(ProgramRestart):  # more processes are lost while saving
        membership.shards.save()
