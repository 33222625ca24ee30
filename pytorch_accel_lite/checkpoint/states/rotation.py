"""Which old training states are deleted when a new one is complete."""

from __future__ import annotations

from pytorch_accel_lite.checkpoint.states.store import StateStore


def remove_old_states(store: StateStore, keep: int | None, protected: set[str]) -> None:
    """Remove all but the newest states, and what killed runs have left incomplete.

    Args:
        keep: the number of newest states to keep; ``None`` keeps all
        protected: names of states that are kept in any case
    """
    for name in [] if keep is None else store.newest_first()[keep:]:
        if name not in protected:
            store.remove(name)
    store.remove_incomplete()
