"""How the processes of a sharded run go on without one of them: their program begins again, from the latest state.

Torch has no way to reshard a model. If others have the shards of a lost process, too, the latest state is one that
they save for this.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import cast

from accelerate.state import AcceleratorState, GradientState, PartialState

from pytorch_accel_lite.extending import TrainerLike, open_trainers, use_holders
from pytorch_accel_lite.extensions.logical import LogicalProcesses
from pytorch_accel_lite.extensions.takeover.joining import wait_for_state
from pytorch_accel_lite.extensions.takeover.membership import BeginAgain, Membership

_MANIFEST = "manifest.json"
#: When each state was saved, by its folder.
States = dict[str, float]


def has_sharded_trainer() -> bool:
    """Whether the weights of a trainer are divided among the processes, so that some go with each of them."""
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


def note_states(trainer: TrainerLike, membership: Membership) -> None:
    """At the beginning of a training, note which states others have saved."""
    if membership.states_of_others is None:
        membership.states_of_others = states_of(trainer)
    membership.states = lambda: states_of(trainer)


def newest_state(membership: Membership) -> str | None:
    """Return the newest state that the job has saved in the training that was interrupted."""
    others = membership.states_of_others or {}
    own = {folder: saved_at for folder, saved_at in membership.states().items() if others.get(folder) != saved_at}
    return max(own, key=lambda folder: own[folder]) if own else None


def join_sharded(membership: Membership) -> None:
    """Join a sharded run that others have begun, before the program of this process begins."""
    membership.trainings = 1
    membership.resumes_from = wait_for_state(membership)
    membership.forget()
    membership.enter_sharded(membership.joins)


def begin_again(membership: Membership) -> None:
    """Forget what the program has made, and enter the generation that follows."""
    if membership.saves_first:
        _save_state(membership)
    state = membership.resumes_from
    loses_nothing = state is not None and Path(state, _MANIFEST).exists()  # whoever has made the folder may be gone
    membership.resumes_from = state if loses_nothing else newest_state(membership)
    trainers = cast(list[TrainerLike], open_trainers())
    for trainer in trainers:
        trainer.close()
    for kind in (AcceleratorState, GradientState, PartialState):
        shared = vars(kind)["_shared_state"]
        getattr(shared, "_storage", shared).clear()
    membership.forget()
    use_holders(None)
    if not membership.has_entered:
        membership.enter_sharded()
    membership.has_entered = False
    if membership.rank == 0 and not loses_nothing:
        if membership.made is not None:  # it could not be completed
            shutil.rmtree(membership.made, ignore_errors=True)
        where = "the beginning: no state had been saved"
        if membership.resumes_from is not None:
            where = repr(membership.resumes_from)
        print(f"The weights were sharded, and a lost process had some of them. All begin again from {where}.")


def _save_state(membership: Membership) -> None:
    """Save the state with which the training has ended, from the shards that are left."""
    assert membership.shards is not None
    membership.begins_again = membership.is_in_action = False
    with suppress(BeginAgain):  # too many are lost meanwhile
        membership.shards.save()
