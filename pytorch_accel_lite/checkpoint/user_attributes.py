"""Users' attributes: the attributes of trainers and callbacks that this package has not created.

A training state keeps the attributes that have changed since the program created them, and all tensors of moderate
size. It has digests of the other attributes, which show whether the resumed program has created the same values.
Attributes that differ between the processes are kept for each process.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from pytorch_accel_lite.base.constructor_calls import CONSTRUCTOR_ARGUMENTS, library_attributes
from pytorch_accel_lite.base.text import listed
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.base.user_warnings import warn_outside
from pytorch_accel_lite.checkpoint.plain_objects import (
    Decoder,
    Encoder,
    Node,
    NoPlaceError,
    TooManyPartsError,
    digest,
    holds_nothing,
    is_setting,
    tensors_of_node,
)
from pytorch_accel_lite.checkpoint.recorded_settings import may_differ
from pytorch_accel_lite.checkpoint.trainability import trainability
from pytorch_accel_lite.checkpoint.trained_objects import loose_parameters, trained_objects, unsaved_attribute_names
from pytorch_accel_lite.run.callback_handler import named_callbacks
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.modules_and_optimizers import registered_objects
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.training_state import CreatedAttributes, Key

T = TypeVar("T")

_MOST_PARTS = 100_000  # maximum parts of an attribute for a digest before a run
_MOST_BYTES = 1 << 28
_KEPT_ANYWAY = 1 << 20  # bytes: smaller attributes with tensors are kept even if unchanged
_LARGE = 1 << 30  # bytes that cause a message
_RECENT = 30 * 24 * 3600  # seconds


def note_created_attributes(trainer: TrainerLike) -> CreatedAttributes:
    """Return the attributes created by the program, before a run changes them."""
    created = CreatedAttributes()
    is_saved = _saved_elsewhere(trainer)
    for key, value in _attributes_of_users(trainer):
        created.names.setdefault(key[0], set()).add(key[1])
        try:
            node = Encoder(is_saved, _MOST_PARTS).encode(value, key[1])
        except TooManyPartsError:
            continue
        is_large = sum(tensor.nbytes for tensor in tensors_of_node(node)) > _MOST_BYTES and not isinstance(
            value, nn.Module
        )
        found = None if is_large else digest(node)
        if found is not None:
            created.digests[key] = found
        if is_setting(node):
            created.settings[key] = node
    return created


def note_trained_parameters(trainer: TrainerLike) -> None:
    """Note which parameters are trained after the starting events, which a resumed run repeats."""
    trainer.current_run.created_attributes.trainability = trainability(trainer)


def capture_attributes(trainer: TrainerLike) -> tuple[StateDict, StateDict]:
    """Return the states of users' attributes: those of all processes, and those of this process. A collective."""
    created: CreatedAttributes = trainer.current_run.created_attributes
    nodes: dict[Key, Node] = {}
    digests: dict[Key, str | None] = {}
    kept: set[Key] = set()
    is_alone, is_saved, owners = trainer.ranks.world_size == 1, _saved_elsewhere(trainer), _owners(trainer)
    for key, value in _attributes_of_users(trainer):
        encoder = Encoder(is_saved)
        node = encoder.encode(value, _path(key))
        _print_unsaved(trainer, created, encoder.unsaved)
        if holds_nothing(node):
            continue
        nodes[key] = node
        before = created.digests.get(key)
        must_compare = not is_alone or (before is not None and key not in created.changed)
        digests[key] = digest(node) if must_compare else None
        if before is None or digests[key] != before:
            created.changed.add(key)
        if key in created.changed or _is_kept_anyway(node):
            kept.add(key)
        encoder.pack()
    kept, own = (kept, set()) if is_alone else _agree_on_kept(trainer, kept, digests)
    of_all: StateDict = {
        "kept": _by_owner({key: nodes[key] for key in nodes if key in kept - own}),
        "unchanged": _by_owner({key: digests[key] for key in nodes if key not in created.changed}),
        "settings": _by_owner({k: n for k, n in created.settings.items() if k in nodes and k not in created.changed}),
        "removed": _removed_attributes(created, owners),
        "own": _by_owner(dict.fromkeys(sorted(own))),
    }
    _print_large(trainer, created, of_all["kept"])
    return of_all, _by_owner({key: nodes[key] for key in nodes if key in own})


def _removed_attributes(created: CreatedAttributes, owners: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the attributes that a run has removed, by owner."""
    return {name: sorted(created.names.get(name, set()) - vars(owner).keys()) for name, owner in owners.items()}


def _agree_on_kept(trainer: TrainerLike, kept: set[Key], digests: dict[Key, str | None]) -> tuple[set[Key], set[Key]]:
    """Return the attributes that at least one process keeps, and those among them that differ between processes."""
    by_rank = trainer.all_gather_object((kept, digests))
    kept = set().union(*(of_rank for of_rank, _ in by_rank))
    first = by_rank[0][1]
    return kept, {key for key in kept if first.get(key) is None or any(of.get(key) != first[key] for _, of in by_rank)}


def restore_attributes(
    trainer: TrainerLike, saved: StateDict, own: StateDict | None, source: str, is_final: bool
) -> None:
    """Restore the users' attributes, in place if the program has created them.

    Args:
        own: the states of this process; ``None`` if another number of processes saved them
        is_final: whether no more attributes will be created, so that missing ones are reported
    """
    owners = _owners(trainer)
    lost = []
    for owner, states in _merged(saved.get("kept", {}), own or {}).items():
        if owner not in owners:
            continue  # another message reports the missing callback
        held, unsaved = vars(owners[owner]), unsaved_attribute_names(owners[owner])
        for name, node in states.items() if is_final else copy.deepcopy(states).items():
            if name in unsaved:
                continue  # the run that saved the state kept it
            try:
                held[name] = Decoder(trainer.device, source).decode(node, held.get(name, NoPlaceError))
            except NoPlaceError:
                lost.append(_path((owner, name)))
    for owner, names in saved.get("removed", {}).items() if is_final else ():
        for name in names if owner in owners else ():
            vars(owners[owner]).pop(name, None)
    if is_final:
        _restore_settings(trainer, saved, owners)
        _say_what_is_lost(saved, own, lost, source)
        _say_what_differs(trainer, saved)


def _restore_settings(trainer: TrainerLike, saved: StateDict, owners: Mapping[str, object]) -> None:
    """Reset attributes that the saved run had not changed to their created values: events may have changed them."""
    settings = trainer.current_run.created_attributes.settings
    for owner, digests in saved.get("unchanged", {}).items():
        for name in digests:
            if owner in owners and (owner, name) in settings:
                held = vars(owners[owner])
                decoder = Decoder(trainer.device, "")
                with suppress(NoPlaceError):
                    held[name] = decoder.decode(settings[owner, name], held.get(name, NoPlaceError))


def _say_what_is_lost(saved: StateDict, own: StateDict | None, lost: list[str], source: str) -> None:
    if lost:
        warn_outside(
            f"{source!r} holds objects that only the program can create, but has not: {', '.join(lost)}. Create them "
            "in the constructor or at the start of the run, as in the run that saved the state."
        )
    by_rank = [_path((owner, name)) for owner, names in saved.get("own", {}).items() for name in names]
    if by_rank and own is None:
        warn_outside(
            f"These attributes differed between the processes, whose number has changed: {listed(by_rank, 10)}. They "
            "are as the program creates them. register_for_checkpointing() takes an object whose state_dict() gathers "
            "the parts of all."
        )


def _say_what_differs(trainer: TrainerLike, saved: StateDict) -> None:
    """Report attributes that the program creates differently from the saved run, which had not changed them."""
    created: CreatedAttributes = trainer.current_run.created_attributes
    kept = {(owner, name) for owner, states in saved.get("kept", {}).items() for name in states}
    others = [
        (owner, name)
        for owner, digests in saved.get("unchanged", {}).items()
        for name, before in digests.items()
        if created.digests.get((owner, name), before) != before
    ]
    settings = [key for key in others if key not in kept and key in created.settings]
    if settings := [key for key in settings if key not in created.compared and not _is_moved(trainer, saved, key)]:
        shown = (
            f"{_path(key)} is {_short_value(created.settings[key])}, {_describe_setting_before(saved, key)}"
            for key in settings
        )
        trainer.print(f"Different from the run that saved the state: {'; '.join(shown)}. The new values hold.")
    if restored := [_path(key) for key in others if key in kept]:
        trainer.print(
            f"The program has {listed(restored, 10)} unlike the run that saved the state. The saved values are "
            "restored."
        )
    if large := [_path(key) for key in others if key not in kept and key not in created.settings]:
        warn_outside(
            f"The program creates {listed(large, 10)} unlike the run that saved the state. The state does not hold "
            "them, as the run had not changed them. Create them from the same data and seed for the same results."
        )


def _is_moved(trainer: TrainerLike, saved: StateDict, key: Key) -> bool:
    """Whether a setting differs only in a place or a device."""
    before, now = _setting_before(saved, key), trainer.current_run.created_attributes.settings[key]
    return before is not NoPlaceError and _without_places(before, key[1]) == _without_places(now, key[1])


def _without_places(node: Node, name: str) -> Node:
    if isinstance(node, str):
        return "" if may_differ(name) else node
    if isinstance(node, dict):
        return {key: _without_places(part, key) for key, part in node.items()}
    if isinstance(node, (tuple, list)):
        return ["path"] if node[:1] == ("path",) else [_without_places(part, name) for part in node]
    return node


def _describe_setting_before(saved: StateDict, key: Key) -> str:
    before = _setting_before(saved, key)
    return "which was something else" if before is NoPlaceError else f"and was {_short_value(before)}"


def _setting_before(saved: StateDict, key: Key) -> Node:
    return saved.get("settings", {}).get(key[0], {}).get(key[1], NoPlaceError)


def _short_value(node: Node) -> str:
    try:
        text = repr(Decoder(torch.device("cpu"), "").decode(node, NoPlaceError))
    except NoPlaceError:
        return "something else"
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe_unsaved(trainer: TrainerLike) -> str:
    """Return a description of the parts of users' attributes that states cannot hold; an empty text without any."""
    created: CreatedAttributes = trainer.current_run.created_attributes
    unsaved: dict[str, str] = {}
    is_saved = _saved_elsewhere(trainer)
    for key, value in _attributes_of_users(trainer):
        encoder = Encoder(is_saved, _MOST_PARTS)
        try:
            encoder.encode(value, _path(key))
        except TooManyPartsError:
            continue
        unsaved |= encoder.unsaved
    return _describe_new_unsaved(created, unsaved)


def _describe_new_unsaved(created: CreatedAttributes, unsaved: Mapping[str, str]) -> str:
    new = {path: kind for path, kind in unsaved.items() if path not in created.warned_of}
    created.warned_of |= new.keys()
    if not new:
        return ""
    return (
        f"Training states cannot hold {listed([f'{path} ({kind})' for path, kind in new.items()], 10)}: a resumed run "
        "has what the program creates. If that matters, give the object state_dict() and load_state_dict(state)."
    )


def _print_unsaved(trainer: TrainerLike, created: CreatedAttributes, unsaved: Mapping[str, str]) -> None:
    if unsaved and (described := _describe_new_unsaved(created, unsaved)):
        trainer.print(described)


def _print_large(trainer: TrainerLike, created: CreatedAttributes, kept: Mapping[str, Mapping[str, Node]]) -> None:
    """Print once which attributes make states large."""
    for owner, states in kept.items():
        for name, node in states.items():
            size = sum(tensor.nbytes for tensor in tensors_of_node(node))
            path = _path((owner, name))
            if size >= _LARGE and f"{path}: size" not in created.warned_of:
                created.warned_of.add(f"{path}: size")
                trainer.print(f"Each training state holds {path}, {size / 1e9:.1f} GB.")


def changed_modules(trainer: TrainerLike) -> dict[str, nn.Module]:
    """Return the modules in attributes of the trainer that no optimizer trains, but that the run has changed."""
    created: CreatedAttributes = trainer.current_run.created_attributes
    changed = {}
    for key, value in _attributes_of_users(trainer):
        before = created.digests.get(key)
        if key[0] or not isinstance(value, nn.Module) or before is None:
            continue
        if key in created.changed or digest(Encoder().encode(value, key[1])) != before:
            changed[key[1]] = value
    return changed


def _attributes_of_users(trainer: TrainerLike) -> Iterator[tuple[Key, object]]:
    """Yield the users' attributes, except points in time and attributes that are saved with the trainer."""
    now = time.time()
    trained = trained_objects(trainer)
    for owner_name, owner in _owners(trainer).items():
        library = _library_names(owner) | unsaved_attribute_names(owner)
        for name, value in [*vars(owner).items()]:
            is_instant = type(value) is float and now - _RECENT < value <= now
            if name not in library and not is_instant and (owner_name or name not in trained):
                yield (owner_name, name), value


def _owners(trainer: TrainerLike) -> dict[str, TrainerLike | TrainerCallback]:
    """Return the owners of kept attributes, by name: the trainer, and callbacks without a state of their own."""
    if not trainer.saves_attributes:
        return {}
    callbacks = {
        name: callback
        for name, callback in named_callbacks(trainer.callback_handler).items()
        if not is_from_this_package(type(callback)) and callback.saves_attributes and not _has_own_state(callback)
    }
    return {"": trainer, **callbacks}


def _has_own_state(callback: TrainerCallback) -> bool:
    method = getattr(type(callback), "state_dict", None) or getattr(callback, "state_dict", None)
    return method is not None and not is_from_this_package(method)


def _library_names(owner: TrainerLike | TrainerCallback) -> set[str]:
    """Return the names of the package's own attributes, which its classes have or its constructors set."""
    ours = [kind for kind in type(owner).__mro__ if is_from_this_package(kind)]
    if isinstance(owner, TrainerCallback):
        ours_has = set(chain.from_iterable(map(vars, ours)))
        if ours != [TrainerCallback]:  # a built-in base class may create private attributes later
            ours_has |= {name for name in vars(owner) if name.startswith("_")}
        return ours_has | {CONSTRUCTOR_ARGUMENTS} | library_attributes(owner)
    return library_attributes(owner)


def _saved_elsewhere(trainer: TrainerLike) -> Callable[[object], bool]:
    """Return whether an object is saved elsewhere in a training state, or is a part of the run."""
    optimizer = trainer.optimizer
    roots: list[object] = [trainer.model, trainer.get_model(), trainer.loss_func]
    roots += [*trained_objects(trainer).values(), *loose_parameters(trainer).values()]
    roots += registered_objects(trainer).values()
    modules = [root for root in roots if isinstance(root, nn.Module)]
    objects = [
        trainer, trainer.accelerator, trainer.callback_handler, trainer.run_history, trainer.current_run, optimizer,
        getattr(optimizer, "optimizer", None), trainer.scheduler, trainer.train_dataset, trainer.eval_dataset,
        *trainer.callback_handler, *roots,
    ]  # fmt: skip
    for module in modules:
        objects += [*module.modules(), *module.parameters(), *module.buffers()]
    ids = {id(thing): thing for thing in objects if thing is not None}
    return lambda value: id(value) in ids


def _is_kept_anyway(node: Node) -> bool:
    """Whether a node has tensors (the program may have drawn them at random) and is small enough to be stored."""
    sizes = [tensor.nbytes for tensor in tensors_of_node(node)]
    return not is_setting(node) and sum(sizes) <= _KEPT_ANYWAY


def _by_owner(values: Mapping[Key, T]) -> dict[str, dict[str, T]]:
    result: dict[str, dict[str, T]] = {}
    for (owner, name), value in values.items():
        result.setdefault(owner, {})[name] = value
    return result


def _merged(first: Mapping[str, dict[str, T]], second: Mapping[str, dict[str, T]]) -> dict[str, dict[str, T]]:
    return {owner: {**first.get(owner, {}), **second.get(owner, {})} for owner in dict.fromkeys([*first, *second])}


def _path(key: Key) -> str:
    owner, name = key
    return f"{owner}.{name}" if owner else name
