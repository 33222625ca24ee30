"""What a training state holds of a trainer, and how it is restored."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from pytorch_accel_lite.checkpoint import fit_model_state, full_state_dict, load_optimizer_state, model_state
from pytorch_accel_lite.checkpoint.training_state import (
    Snapshot,
    TrainingState,
    read_state,
    read_weights,
    take_snapshot,
)
from pytorch_accel_lite.randomness import capture_generators, mix, restore_generators, seed_generators

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

_ENGINES = {
    DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP
}  # fmt: skip


def named_callbacks(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the callbacks under names that tell two of a kind apart: ``Class``, ``Class#2`` ..."""
    seen: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        yield kind if seen[kind] == 1 else f"{kind}#{seen[kind]}", callback


def check_states_are_possible(accelerator: Accelerator) -> None:
    """Raise an error for engines whose weights and optimizer we cannot gather and verify."""
    kind = accelerator.distributed_type
    if kind not in _ENGINES or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise ValueError(
            f"Training states are not possible with {kind.value}: its weights and optimizer cannot be gathered here. "
            "Use FSDP with fsdp_version=2, or save with accelerator.save_state() in a callback of yours."
        )


def capture(trainer: Trainer, extra: dict[str, Any]) -> Snapshot:
    """Return all that a training state holds of a trainer; to be called on every process."""
    shared = _collect_shared(trainer) | {"extra": extra}
    keep = trainer.accelerator.is_main_process
    model = model_state(trainer.get_model(keep_torch_compile=False), keep)
    rank = trainer.ranks.rank
    return take_snapshot(rank, model if keep else {}, shared, _collect_own(trainer), _collect_metadata(trainer))


def _collect_shared(trainer: Trainer) -> dict[str, Any]:
    """Return what is the same on all ranks."""
    scaler = trainer.accelerator.scaler
    optimizer = trainer.optimizer
    keep = trainer.accelerator.is_main_process
    return {
        "optimizer": None if optimizer is None else full_state_dict(optimizer.state_dict(), keep),
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "loss_func": _loss_state(trainer),
        "history": trainer.run_history.state_dict() if hasattr(trainer.run_history, "state_dict") else None,
        "callbacks": {
            name: callback.state_dict()
            for name, callback in named_callbacks(trainer.callback_handler)
            if hasattr(callback, "state_dict")
        },
        "objects": {name: obj.state_dict() for name, obj in trainer.registered_objects.items()},
        "losses": trainer.loss_trackers.summed(trainer.ranks),
        "microbatches": trainer.num_microbatches,
        "items_per_batch": trainer.gradient_window.items_per_batch,
    }


def _loss_state(trainer: Trainer) -> dict[str, Any]:
    """Return what a loss function has learned: its parameters that are trained, and its buffers; not the model's."""
    if not isinstance(trainer.loss_func, nn.Module):
        return {}
    model = trainer.get_model()
    own = set(map(id, [*model.parameters(), *model.buffers()]))
    state = trainer.loss_func.state_dict(keep_vars=True)
    is_constant = {name for name, value in state.items() if isinstance(value, nn.Parameter) and not value.requires_grad}
    return {
        name: value.detach()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and id(value) not in own and name not in is_constant
    }


def _collect_own(trainer: Trainer) -> dict[str, Any]:
    """Return what is this rank's own: its generators, and its part of the running losses."""
    own = {"losses": {name: tracker.state_dict() for name, tracker in trainer.loss_trackers.items()}}
    return own | {"generators": capture_generators()}


def restore(trainer: Trainer, state: TrainingState) -> None:
    """Put back the weights, the optimizer, the scheduler, the counts and the history."""
    shared = state.shared
    model = trainer.get_model(keep_torch_compile=False)
    weights = fit_model_state(model, read_weights(state), state.directory)
    for name, owner in (
        ("optimizer", trainer.optimizer),
        ("scheduler", trainer.scheduler),
        ("scaler", trainer.accelerator.scaler),
    ):
        if shared[name] is not None and owner is not None:
            try:
                if name == "optimizer":
                    load_optimizer_state(owner, shared[name])
                else:
                    owner.load_state_dict(shared[name])
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f"The {name} in the training state {str(state.directory)!r} does not fit the trainer's "
                    f"{type(owner).__name__}: {error}. Create it as it was when the state was saved."
                ) from error
    model.load_state_dict(weights)
    if isinstance(trainer.loss_func, nn.Module):
        trainer.loss_func.load_state_dict(shared.get("loss_func") or {}, strict=False)
    if shared["history"] is not None and hasattr(trainer.run_history, "load_state_dict"):
        trainer.run_history.load_state_dict(shared["history"])
    trainer.progress.load_state_dict(state.metadata["progress"])
    restore_objects(trainer, shared["objects"])
    trainer.num_microbatches = shared.get("microbatches", 1)
    trainer.gradient_window.items_per_batch = shared["items_per_batch"]


def restore_objects(trainer: Trainer, states: dict[str, Any]) -> None:
    """Put back the objects that the user registered."""
    for name, obj in trainer.registered_objects.items():
        if name in states:
            obj.load_state_dict(states[name])
        else:
            warnings.warn(f"The training state holds nothing for the registered object {name!r}.", stacklevel=2)
    for name in states.keys() - trainer.registered_objects.keys():
        warnings.warn(f"The training state holds an object {name!r} that is not registered any more.", stacklevel=2)


def restore_callbacks(callbacks: Iterable[Any], state: TrainingState) -> None:
    """Put back the states of the callbacks; warn of those that have none, and of states without a callback."""
    states = dict(state.shared["callbacks"])
    for name, callback in named_callbacks(callbacks):
        if hasattr(callback, "load_state_dict"):
            if name in states:
                callback.load_state_dict(states.pop(name))
            else:
                warnings.warn(f"The training state holds nothing for the callback {name}.", stacklevel=2)
    for name in states:
        warnings.warn(f"The training state holds the state of a callback {name} that is gone.", stacklevel=2)


def restore_per_rank(trainer: Trainer, state: TrainingState) -> None:
    """Put back the running losses and, last before training goes on, the generators of this rank.

    With another number of processes, generators are seeded again, and rank 0 has the sums of all ranks' losses.
    """
    if state.own is None:
        for name, (total, count) in state.shared["losses"].items() if trainer.ranks.rank == 0 else ():
            trainer.loss_trackers.of(name).load_state_dict(
                {"total_loss": total, "running_count": count, "loss_value": total / count if count else 0.0}
            )
        seed_generators(
            mix(int(state.metadata["data_seed"] or 0), trainer.progress.update, trainer.accelerator.process_index)
        )
        return
    for name, tracker_state in state.own["losses"].items():
        tracker = trainer.loss_trackers.of(name)
        tracker.load_state_dict({k: _to(v, trainer.device) for k, v in tracker_state.items()})
    restore_generators(state.own["generators"])


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def find_state(
    trainer: Trainer, sources: list[Any], resume_from: str | os.PathLike[str] | None
) -> TrainingState | None:
    """Find, verify and read the state that a run is to go on from; ``None`` for a fresh start.

    :param sources: where to look for ``"latest"``: objects with ``find_latest(trainer)`` and ``save_dir``
    :param resume_from: see :meth:`Trainer.train <pytorch_accel_lite.trainer.Trainer.train>`
    """
    if resume_from is None:
        return None
    if resume_from == "latest":
        return _find_latest(trainer, sources)
    state = read_state(Path(resume_from), trainer.ranks)
    trainer.print(f"Resuming from {os.fspath(resume_from)}: {describe(state.metadata)}")
    return state


def _find_latest(trainer: Trainer, savers: list[Any]) -> TrainingState | None:
    """Return the newest whole state of all callbacks that save some."""
    if not savers:
        raise ValueError(
            "resume_from='latest' needs a SaveTrainingStateCallback, whose save_dir says where to look. Add one to "
            "the trainer's callbacks, or give the directory of a state."
        )
    states = [state for state in (saver.find_latest(trainer) for saver in savers) if state is not None]
    if not states:
        folders = " or ".join(repr(os.fspath(saver.save_dir)) for saver in savers)
        trainer.print(f"No training state in {folders}: starting afresh")
        return None
    state: TrainingState = max(states, key=lambda state: state.metadata["saved_at"])
    progress = state.metadata["progress"]
    trainer.print(f"Resuming from {str(state.directory)!r}: epoch {progress['epoch']}, update {progress['update']}")
    return state


def describe(metadata: dict[str, Any]) -> str:
    """Say in words how far the run of a state had come."""
    progress = metadata["progress"]
    return f"epoch {progress['epoch']}, update {progress['update']}, {progress['samples']} samples"


def _collect_metadata(trainer: Trainer) -> dict[str, Any]:
    """Return what a state's manifest says of its run, in types of JSON."""
    config = {} if trainer.run_config is None else trainer.run_config.to_dict()
    return {
        "saved_at": time.time(),
        "progress": trainer.progress.state_dict(),
        "stop_reason": trainer.stop_reason,
        "interrupted": trainer.interruption is not None,
        "world_size": trainer.accelerator.num_processes,
        "seed": trainer.seed,
        "data_seed": trainer.data_seed,
        "run_config": {k: v if isinstance(v, (int, float, str, type(None))) else repr(v) for k, v in config.items()},
    }
