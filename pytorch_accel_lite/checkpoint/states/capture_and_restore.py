"""What a training state contains: capturing it in a trainer, and restoring it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import TypeGuard

import torch
from accelerate.utils import send_to_device
from torch import nn

from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.modules import without_compile
from pytorch_accel_lite.base.nested_values import is_dense
from pytorch_accel_lite.base.random_generators import (
    capture_generators,
    derive_seed,
    restore_generators,
    seed_generators,
)
from pytorch_accel_lite.base.types import HasStateDict, Keys, StateDict, Tree
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.checkpoint.disk.checkpoint_files import LEFT_OUT
from pytorch_accel_lite.checkpoint.disk.extracted_tensors import extract_tensors
from pytorch_accel_lite.checkpoint.disk.safetensors_files import fits_safetensors, untie
from pytorch_accel_lite.checkpoint.disk.shards import is_sharded_tensor, local_parts
from pytorch_accel_lite.checkpoint.disk.torch_files import storable
from pytorch_accel_lite.checkpoint.models.frozen_weights import describe_other_weights, leave_out_frozen
from pytorch_accel_lite.checkpoint.models.model_forms import base_of
from pytorch_accel_lite.checkpoint.models.states_of_trained_objects import (
    fit_trained_object_states,
    load_each,
    load_loss_state,
    load_state,
    loss_state,
    trained_object_states,
    undone_on_error,
)
from pytorch_accel_lite.checkpoint.models.trainability import (
    add_missing_groups,
    capture_gradients,
    capture_trainability,
    lacks_groups,
    order_groups,
    restore_gradients,
    restore_trainability,
)
from pytorch_accel_lite.checkpoint.models.weights import fit_model_state, full_state_dict, model_state
from pytorch_accel_lite.checkpoint.states.machine_facts import machine_facts
from pytorch_accel_lite.checkpoint.states.settings_in_states_seam import settings_recorder
from pytorch_accel_lite.checkpoint.states.state_files import (
    SHARD_OF_MODEL,
    CapturedState,
    pack_numbers,
    read_tensors,
    read_weights,
)
from pytorch_accel_lite.optimizers.optimizer_parts import (
    group_names,
    scheduler_class_names,
    single_optimizers,
    state_class_names,
)
from pytorch_accel_lite.optimizers.scheduled_options import Options, set_options
from pytorch_accel_lite.run.callback_handler import callbacks_with
from pytorch_accel_lite.run.progress import EpochPhase
from pytorch_accel_lite.run.request_and_config import DatedStateSource
from pytorch_accel_lite.run.run import Step, TrainerLike
from pytorch_accel_lite.run.step_division import Division, numbers_of_shares
from pytorch_accel_lite.run.trained_objects import all_registered_objects, saved_optimizers
from pytorch_accel_lite.run.training_state import TrainingState

# A training state has the weights, what all ranks share (``_collect_shared``) and what each has of its own
# (``_collect_local``). restore_before_start restores what it can before the starting events of the resumed run, and
# restore_after_start the rest after them, as callbacks may create or reset objects in these events. If code of users
# runs there, restore_again restores the weights, loss_func and optimizer once more. The keys never change:
# test_state_files.py has them all, by version. States lack keys of later versions, so those from 0.2 on are read with a
# default.

#: Which values ``evaluate`` has recorded, by metric. States have it by this name.
_RECORDED_BY_EVALUATE = "set_apart"


def capture(
    trainer: TrainerLike, extra: StateDict, created: Mapping[str, int] | None = None, sharded: bool = False
) -> CapturedState:
    """Return the part of a trainer's state that this rank writes, without copying it. Call it on every process.

    Args:
        created: checksums of weights; frozen weights that match them are left out
        sharded: whether each rank keeps its shards; by default they are gathered

    Raises:
        TypeError: if a value cannot be stored without pickle; names the path to it
    """
    is_first = trainer.accelerator.is_main_process
    run, division, history = trainer.current_run.training_run, trainer.division, trainer.run_history
    shared = _collect_shared(trainer, is_first, sharded) | {"extra": extra}
    weights, left_out = _collect_weights(trainer, is_first, created, sharded)
    shards = {f"{SHARD_OF_MODEL}{name}": value for name, value in weights.items() if is_sharded_tensor(value)}
    full = {name: value for name, value in weights.items() if not is_sharded_tensor(value)}
    tensors = {name: value for name, value in full.items() if fits_safetensors(value)}
    large: dict[str, torch.Tensor] = {}

    shared |= left_out | {"model_extra": {name: value for name, value in full.items() if name not in tensors}}
    shared["user_attributes"], own = run.user_attributes.capture(trainer)
    _add_entries(shared, run.training_step, run.training_step.state_dict())
    _add_entries(shared, division, division.capture(trainer.ranks, run.loss_trackers, run.step_metrics))
    shared = extract_tensors(storable(shared, "state"), shards, large)
    shared["history"] = storable(pack_numbers(history.state_dict()), "state.history") if _is_saved(history) else None

    local = storable(_collect_local(trainer) | {"user_attributes": own}, "state")
    parts = local_parts(shards) if sharded else None
    if not is_first:
        return CapturedState(local, parts)
    distinct, tied = untie(tensors)
    metadata = _collect_metadata(trainer)
    return CapturedState(local, parts, weights=distinct, tied=tied, tensors=large, shared=shared, metadata=metadata)


def _collect_weights(
    trainer: TrainerLike, is_first: bool, created: Mapping[str, int] | None, sharded: bool
) -> tuple[StateDict, StateDict]:
    """Return the weights, and the entries of the shared state on those that are left out."""
    model = trainer.get_model(keep_torch_compile=False)
    weights = without_compile(model.state_dict()) if sharded else model_state(model, is_first)
    if is_first or sharded:
        left_out = leave_out_frozen(model, weights, created, only_quantised=created is None)
        if left_out or created is not None:
            return weights, {LEFT_OUT: left_out, "base": base_of(model)}
    return weights, {}


def _collect_shared(trainer: TrainerLike, is_first: bool, sharded: bool) -> StateDict:
    """Return the state shared by all ranks, without the weights. It is gathered, unless it will be saved in shards."""

    def gather(state: Tree) -> Tree:
        return state if sharded else full_state_dict(state, is_first)

    run, latest = trainer.current_run.training_run, trainer.current_run.latest
    callbacks = callbacks_with("state_dict", trainer.callback_handler)
    return {
        **{
            name: None if owner is None else gather(owner.state_dict())
            for name, owner in _updated_objects(trainer).items()
        },
        "optimizer_classes": {  # for an error about another class
            name: state_class_names(optimizer) for name, optimizer in saved_optimizers(trainer).items()
        },
        "scheduler_classes": scheduler_class_names(trainer.scheduler),
        "settings": _settings_text(trainer) if is_first else "",  # SettingsRecorder compares them
        "loss_func": loss_state(trainer),
        "attributes": trained_object_states(trainer, is_first),
        "callbacks": {name: gather(callback.state_dict()) for name, callback in callbacks.items()},
        "objects": {name: obj.state_dict() for name, obj in all_registered_objects(trainer).items()},
        "trainability": capture_trainability(trainer),
        "gradients": gather(capture_gradients(trainer)),
        "losses": run.loss_trackers.summed(trainer.data_ranks),  # for another number of processes
        "schedule_shift": run.schedule.shift,
        "items_per_batch": run.window.items_per_batch,
        # loop/evaluation.py reads them when they begin.
        "evaluations": None if run.evaluation_interval is None else run.evaluation_interval.state_dict(run),
        _RECORDED_BY_EVALUATE: {name: sorted(numbers) for name, numbers in latest.recorded_by_evaluate.items()},
        "counts_to_resume_from": run.counts_to_resume_from(trainer.run_history),
        **_position(trainer, is_local=False),
    }


def _add_entries(shared: StateDict, part: Step | Division, entries: StateDict) -> None:
    """Add the entries of a kind of step or of a division to the shared state, none of whose entries they may replace.

    Raises:
        ValueError: if they would; names them
    """
    if taken := sorted(entries.keys() & {*shared, LEFT_OUT, "base", "history"}):
        raise ValueError(
            f"The state of {type(part).__name__} has {listed([repr(name) for name in taken])}, which training states "
            "have already. Return it under another name."
        )
    shared |= entries


def _settings_text(trainer: TrainerLike) -> str:
    """Return the settings of the current run as JSON. A run that saves states has recorded them."""
    recorded = trainer.current_run.training_run.recorded_settings
    return json.dumps(settings_recorder().record(trainer, reads_data=False) if recorded is None else recorded)


def _collect_local(trainer: TrainerLike) -> StateDict:
    """Return the state of this rank, without the attributes of users."""
    trackers = trainer.current_run.training_run.loss_trackers
    return {
        "losses": {name: tracker.state_dict() for name, tracker in trackers.items()},
        "generators": capture_generators(),
        **_position(trainer, is_local=True),
    }


def _position(trainer: TrainerLike, is_local: bool) -> StateDict:
    """Return the state that the loader needs to resume, also within an epoch. It may differ between processes."""
    loader = trainer.current_run.training_run.data.train_loader
    if loader is None or getattr(loader, "has_own_position", None) != is_local:
        return {}
    if not trainer.progress.is_mid_epoch:
        return {"epoch_read": loader.epoch_state()}
    size = getattr(loader, "batch_size", None)
    return {
        "epoch_read": loader.epoch_state(),
        "position": loader.position(),
        "source_batch_size": size if isinstance(size, int) else None,
    }


def _updated_objects(trainer: TrainerLike) -> StateDict:
    """Return the objects that an update steps, with ``None`` for missing objects."""
    return {"optimizer": trainer.optimizer, "scheduler": trainer.scheduler, "scaler": trainer.accelerator.scaler}


def _check_optimizer_classes(trainer: TrainerLike, state: TrainingState) -> None:
    """Raise an error if an optimizer's class differs from the class in the state, which older states do not record."""
    saved = state.shared.get("optimizer_classes", {})
    for name, optimizer in saved_optimizers(trainer).items():
        groups = zip(group_names(optimizer), saved.get(name, ()), state_class_names(optimizer), strict=False)
        for group, before, now in groups:
            if before and now and not set(before) & set(now):
                raise ValueError(
                    f"The {name} in the training state {str(state.directory)!r} does not fit the trainer's: "
                    f"{f'that of group {group!r}' if group else 'it'} was {before[0]} and is {now[0]} now. Create it "
                    "as it was when the state was saved, or start a new run from the weights of the state."
                )


def _check_scheduler_classes(trainer: TrainerLike, state: TrainingState) -> None:
    """Raise an error if a scheduler's class differs from the class in the state, which older states do not record."""
    now = scheduler_class_names(trainer.scheduler)
    for name, before in state.shared.get("scheduler_classes", {}).items():
        if name in now and not set(before) & set(now[name]):
            raise ValueError(
                f"The scheduler{f' {name!r}' if name else ''} in the training state {str(state.directory)!r} was a "
                f"{before[0]}, and is a {now[name][0]} now. Create it as it was when the state was saved, or start a "
                "new run from the weights of the state."
            )


def _read_tensors_as_here(trainer: TrainerLike, model: nn.Module, state: TrainingState) -> None:
    """Read the tensors in ``shared``, sharded like those of the trainer."""
    current: dict[str, torch.Tensor] = without_compile(model.state_dict())
    groups = getattr(trainer.optimizer, "param_groups", ())
    optimized: dict[int, torch.Tensor] = dict(enumerate(parameter for group in groups for parameter in group["params"]))

    def find_like(keys: Keys) -> torch.Tensor | None:
        if keys[:2] == ("optimizer", "state"):
            return optimized.get(keys[2])
        return current.get(keys[-1])  # for averaged weights, for example

    read_tensors(state, find_like)


def _fit_weights(model: nn.Module, state: TrainingState) -> StateDict:
    """Return the weights of a state for ``model.load_state_dict``, without loading them."""
    read = read_weights(state, without_compile(model.state_dict()))
    return fit_model_state(model, read, state.directory, left_out=state.shared.get(LEFT_OUT, {}))


def _weights_if_they_fit(model: nn.Module, state: TrainingState, may_add_weights: bool) -> StateDict:
    """Return the weights of a state, or note that the model lacks some which starting events may add."""
    try:
        return _fit_weights(model, state)
    except ValueError:
        if not may_add_weights:
            raise
        state.has_other_weights = True
        return {}


def _load_updated_objects(trainer: TrainerLike, state: TrainingState, with_scheduler: bool) -> None:
    """Load the optimizer, the scheduler and the scaler, and what the trainer's attributes train; all or nothing."""
    loads_of_attributes = fit_trained_object_states(trainer, state.shared.get("attributes", {}), state.directory)
    with undone_on_error(trainer, optimizers=True, schedulers=with_scheduler):
        for name, owner in _updated_objects(trainer).items():
            saved = state.shared[name]
            if owner is None or saved is None or (name == "scheduler" and not with_scheduler):
                continue
            if name == "optimizer" and lacks_groups(owner, saved):
                state.postponed.add(name)  # the starting events may add the missing groups
            else:
                load_state(name, owner, saved, state.directory)
        for load in loads_of_attributes:
            load()


def _check_left_out(model: nn.Module, state: TrainingState) -> None:
    """Raise an error if the model's frozen weights are not those that the state has left out."""
    left_out = state.shared.get(LEFT_OUT)
    if left_out and (others := describe_other_weights(model, left_out, state.directory)):
        before, now = state.shared.get("base", ""), base_of(model)
        base = f" The state began with {before!r}, this model with {now!r}." if before != now else ""
        raise ValueError(
            f"{others}{base} Create the model as it was in the run that saved the state: from the same pretrained "
            "weights, or with the same seed."
        )


def check_history(history: object) -> None:
    """Warn if training states do not hold a user-defined history because it has no ``state_dict()``."""
    if not _is_saved(history):
        name = type(history).__name__
        warn_outside(
            f"run_history: training states do not hold the metrics of a {name}, so a resumed run lacks those of "
            f"earlier epochs. Give {name} the methods state_dict() and load_state_dict(state), or derive it from "
            "InMemoryRunHistory."
        )


def _is_saved(history: object) -> TypeGuard[HasStateDict]:
    return hasattr(history, "state_dict") and hasattr(history, "load_state_dict")


def _collect_metadata(trainer: TrainerLike) -> StateDict:
    """Return the facts about the run for the manifest of a state, in JSON types."""
    run = trainer.current_run.training_run
    config = {} if trainer.run_config is None else trainer.run_config.to_dict()
    sources = [source for source in run.request.state_sources if isinstance(source, DatedStateSource)]
    return {
        # Later than all existing states, even if another machine with a faster clock saved them.
        "saved_at": max([time.time(), *(source.next_time() for source in sources)]),
        "goodput": run.goodput.state_dict(),
        "progress": trainer.progress.state_dict(),
        "stop_reason": run.end.reason,
        "stopped_by": run.end.stopped_by,
        "epoch_phase": int(run.epoch_phase),
        "interrupted": run.end.pause is not None,
        "world_size": trainer.accelerator.num_processes,
        "generation": trainer.ranks.generation,
        "seed": trainer.seed,
        "data_seed": run.data.seed,
        "first_epoch": run.data.first_epoch,
        **numbers_of_shares(trainer.division),
        "machine": machine_facts(trainer),
        "run_config": {k: v if isinstance(v, (int, float, str, type(None))) else repr(v) for k, v in config.items()},
    }


def restore_before_start(
    trainer: TrainerLike, state: TrainingState, with_scheduler: bool = True, has_starting_code: bool = False
) -> None:
    """Restore the weights, optimizer, progress, history and, unless disabled, the scheduler.

    In a resumed run, this is done before the starting events, and ``restore_after_start`` after them.

    Args:
        has_starting_code: whether starting events may give the model the weights that it lacks
    """
    _check_optimizer_classes(trainer, state)
    if with_scheduler:
        _check_scheduler_classes(trainer, state)
    order_groups(trainer, state.shared.get("trainability", {}))
    model = trainer.get_model(keep_torch_compile=False)
    _read_tensors_as_here(trainer, model, state)
    shared = state.shared
    weights = _weights_if_they_fit(model, state, has_starting_code)
    _check_left_out(model, state)
    _load_updated_objects(trainer, state, with_scheduler)
    if not state.has_other_weights:
        model.load_state_dict(weights, strict=not shared.get(LEFT_OUT))
    load_loss_state(trainer, shared.get("loss_func", {}), state.directory)
    _restore_user_attributes(trainer, state, is_final=False)
    counts = state.metadata["progress"]  # of another version, they may be more or fewer
    trainer.progress.load_state_dict({name: counts.get(name, 0) for name in vars(trainer.progress)})
    run = trainer.current_run
    run.epoch_phase = EpochPhase(state.metadata.get("epoch_phase", 0))
    _restore_history(trainer, shared)
    load_each("registered object", all_registered_objects(trainer), shared["objects"], is_final=False)
    run.training_step.load_state_dict(shared)
    run.schedule.shift = shared.get("schedule_shift", 0)
    run.window.items_per_batch = shared["items_per_batch"]


def restore_again(trainer: TrainerLike, state: TrainingState, options: Options) -> None:
    """Restore the weights and the optimizer once more, after starting events of the user that may have changed them.

    The saved run had its starting events before it trained: their pretrained weights or halved rates must not come
    again.

    Args:
        options: the options of the optimizer's groups, such as rates, which hold
    """
    shared, model = state.shared, trainer.get_model(keep_torch_compile=False)
    weights, current = _fit_weights(model, state), model.state_dict()
    comparable = {name for name, value in weights.items() if _is_plain(value) and _is_plain(current[name])}
    changed = [name for name in sorted(comparable) if not _are_same(weights[name].to(current[name]), current[name])]
    if changed or len(comparable) < len(weights):
        model.load_state_dict(weights, strict=not shared.get(LEFT_OUT))
    if changed and not state.has_other_weights:
        trainer.print(
            f"The starting events have changed {listed(changed, 3)}. The run resumes with the weights of the state."
        )
    load_loss_state(trainer, shared.get("loss_func", {}), state.directory)
    saved, groups = shared["optimizer"] or {}, getattr(trainer.optimizer, "param_groups", ())
    if len(saved.get("param_groups", ())) == len(groups) == len(options):  # starting events may have added groups
        for part in single_optimizers(trainer.optimizer).values():
            if isinstance(held := getattr(part, "state", None), dict):
                held.clear()  # so that a device never holds two states
        load_state("optimizer", trainer.optimizer, saved, state.directory)
        set_options(trainer.optimizer, options)


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether a weight can be compared. Sharded ones would take a collective; others may be of a kind of their own."""
    return type(weight) in (torch.Tensor, nn.Parameter) and is_dense(weight)


def _are_same(saved: torch.Tensor, current: torch.Tensor) -> bool:
    """Whether two weights are equal, also if both are NaN somewhere, as a buffer may be until it is first used."""
    return saved.shape == current.shape and torch.allclose(saved, current, rtol=0.0, atol=0.0, equal_nan=True)


def _restore_user_attributes(trainer: TrainerLike, state: TrainingState, is_final: bool) -> None:
    own = None if state.local is None else state.local.get("user_attributes", {})
    saved = state.shared.get("user_attributes", {})
    attributes = trainer.current_run.user_attributes
    attributes.restore(trainer, saved, own, os.fspath(state.directory), is_final=is_final)


def _restore_history(trainer: TrainerLike, shared: StateDict) -> None:
    """Restore the history and references to its values. Of a history that is not saved, restore only the epoch."""
    history = trainer.run_history
    if shared["history"] is not None and _is_saved(history):
        history.load_state_dict(shared["history"])
        trainer.run_history.shorten(shared.get("counts_to_resume_from", {}))
        trainer.current_run.latest.recorded_by_evaluate |= {
            name: set(numbers) for name, numbers in shared.get(_RECORDED_BY_EVALUATE, {}).items()
        }
        return
    for _ in range(history.current_epoch, trainer.progress.epochs_completed + 1):
        history._increment_epoch()


def restore_after_start(trainer: TrainerLike, state: TrainingState) -> None:
    """Restore the callbacks, the running losses and the generators of this rank, right before training continues.

    Attributes and registered objects are restored again, because the starting events may have created, reset or moved
    some of them. If the number of processes has changed, generators are reseeded, and rank 0 gets the sum of all ranks'
    losses, unless the number of shares is fixed.
    """
    _check_optimizer_classes(trainer, state)  # including attributes that the starting events have created
    trainability = state.shared.get("trainability", {})
    add_missing_groups(trainer, trainability)
    for name in state.postponed:
        load_state(name, trainer.optimizer, state.shared[name], state.directory)
    for load in fit_trained_object_states(trainer, state.shared.get("attributes", {}), state.directory, is_final=True):
        load()
    load_each("registered object", all_registered_objects(trainer), state.shared["objects"])
    load_each("callback", callbacks_with("load_state_dict", trainer.callback_handler), state.shared["callbacks"])
    _restore_user_attributes(trainer, state, is_final=True)
    restore_trainability(trainer, trainability)
    restore_gradients(trainer, state.shared.get("gradients", {}), trainability.get("frozen", ()))
    _restore_generators(trainer, state)
    _restore_position(trainer, state)
    _restore_losses(trainer, state)


def _own_state(trainer: TrainerLike, state: TrainingState) -> StateDict | None:
    """Return this rank's own state; ``None`` if the number of processes has changed, or that of shares is fixed."""
    return None if trainer.division.has_fixed_shares else state.local


def _restore_generators(trainer: TrainerLike, state: TrainingState) -> None:
    if (own := _own_state(trainer, state)) is not None:
        restore_generators(own["generators"])
    else:
        seed_generators(
            derive_seed(int(state.metadata["data_seed"] or 0), trainer.progress.update, trainer.data_ranks.rank)
        )


def _restore_position(trainer: TrainerLike, state: TrainingState) -> None:
    """Let the loader continue where the saved run was, within an epoch or before the next one."""
    run = trainer.current_run
    loader = run.data.train_loader
    if loader is None or not hasattr(loader, "has_own_position"):
        return
    saved = state.local or {} if loader.has_own_position else state.shared
    loader.restore_epoch_state(saved.get("epoch_read"))
    if trainer.progress.is_mid_epoch and not run.epoch_is_trained:
        loader.batch_size_before = saved.get("source_batch_size")
        if message := loader.move_to(saved.get("position")):
            trainer.print(message)


def _restore_losses(trainer: TrainerLike, state: TrainingState) -> None:
    """Restore the running losses of this rank, or on rank 0 the sums of all ranks, and those of fixed shares."""
    run = trainer.current_run
    if (own := _own_state(trainer, state)) is not None:
        for name, loss in send_to_device(own["losses"], trainer.device).items():
            run.loss_trackers.of(name).load_state_dict(loss)
    elif trainer.data_ranks.rank == 0:
        for name, (total, count) in state.shared["losses"].items():
            run.loss_trackers.of(name).load_sum(total, count)
    trainer.division.restore(state, run.loss_trackers, run.step_metrics)
