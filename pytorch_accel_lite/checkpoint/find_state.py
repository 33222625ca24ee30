"""Finding the training state that ``resume_from`` names, or the latest one.

The newest intact state in a directory is found by ``StateStore.read_latest()`` in ``states/state_store.py``.
"""

from __future__ import annotations

import os

from pytorch_accel_lite.base.paths import StrPath, parse_location
from pytorch_accel_lite.checkpoint.states.machine_facts import describe_changes
from pytorch_accel_lite.checkpoint.stores_by_url import read_state
from pytorch_accel_lite.run.request_and_config import StateSource
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.training_state import TrainingState

#: Words for ``"latest"`` in other libraries.
_LIKE_LATEST = ("latest", "last", "newest", "auto")


def find_state(trainer: TrainerLike, sources: list[StateSource], resume_from: StrPath) -> TrainingState | None:
    """Find, verify and read the state to resume from; ``None`` means a fresh start.

    Args:
        sources: where to look for ``"latest"``, see ``RunRequest.state_sources``
    """
    # A Path may be that of a folder, or of a link, with this name.
    is_latest = resume_from == "latest" or (os.fspath(resume_from) == "latest" and not os.path.exists("latest"))
    resume_from = os.fspath(resume_from)
    if not is_latest and resume_from.lower() in _LIKE_LATEST and not os.path.exists(resume_from):
        raise FileNotFoundError(f"There is no training state at {resume_from!r}. Did you mean resume_from='latest'?")
    if not is_latest:
        state = read_state(parse_location(resume_from, "resume_from"), trainer.ranks)
    elif not sources:
        raise ValueError(
            "resume_from='latest' needs a SaveTrainingStateCallback, whose save_dir is searched. Add one to the "
            "trainer's callbacks, or pass the directory of a state."
        )
    else:
        latest = [found for source in sources if (found := source.find_latest(trainer)) is not None]
        if not latest:
            folders = " or ".join(repr(os.fspath(source.save_dir)) for source in sources)
            previous = trainer.current_run.previous
            has_trained = previous is not None and previous.training_run.progress.update > 0
            weights = ", with the weights that this trainer has trained already" if has_trained else ""
            trainer.print(f"No training state in {folders}: starting a new run{weights}")
            return None
        state = max(latest, key=lambda state: state.metadata["saved_at"])
    progress = state.metadata["progress"]
    trainer.print(f"Resuming from {str(state.directory)!r}: epoch {progress['epoch']}, update {progress['update']}")
    if changes := describe_changes(trainer, state.metadata):
        trainer.print(changes)
    return state
