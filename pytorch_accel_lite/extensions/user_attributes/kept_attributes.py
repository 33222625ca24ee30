"""Keeping users' attributes: the attributes of trainers and callbacks that this package has not created.

A training state keeps the attributes that have changed since the program created them, and all tensors of moderate
size. It has digests of the other attributes, which show whether the resumed program has created the same values.
Attributes that differ between the processes are kept for each process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TypeVar

import torch
from torch import nn

from pytorch_accel_lite.extending import TrainerLike, UserAttributes
from pytorch_accel_lite.extension_tools.arguments_and_errors import may_differ, warn_outside
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.states_and_files import (
    find_saved_beside,
    trained_objects,
    unsaved_attribute_names,
)
from pytorch_accel_lite.extension_tools.texts_and_pages import listed
from pytorch_accel_lite.extensions.user_attributes.attribute_owners import (
    OF_EVERY_MODULE,
    Key,
    ModuleAttributes,
    attributes_of_users,
    encoder_of,
    identity_of,
    owners_in_modules,
    owners_of_attributes,
    path_of,
    place_of,
    saved_elsewhere,
    shares_memory_with_weights,
    sharing_memory,
    with_modules,
)
from pytorch_accel_lite.extensions.user_attributes.plain_objects import (
    Current,
    Decoder,
    Encoder,
    Node,
    NoPlaceError,
    TooManyPartsError,
    bytes_of_node,
    digest,
    holds_nothing,
    is_setting,
)


def describe_changes(saved: StateDict, settings: Mapping[Key, Node]) -> str:
    """Return the settings with their values now and in a state."""
    return "; ".join(
        f"{path_of(key)} is {_short_value(node)}, {_describe_before(_setting_before(saved, key))}"
        for key, node in settings.items()
    )


def is_moved(saved: StateDict, key: Key, now: Node) -> bool:
    """Whether a setting differs from that in a state only in a place or a device."""
    before = _setting_before(saved, key)
    return before is not NoPlaceError and _without_places(before, key[1]) == _without_places(now, key[1])


def _without_places(node: Node, name: str) -> Node:
    if isinstance(node, str):
        return "" if may_differ(name) else node
    if isinstance(node, dict):
        return {key: _without_places(part, key) for key, part in node.items()}
    if isinstance(node, (tuple, list)):
        return ["path"] if node[:1] == ("path",) else [_without_places(part, name) for part in node]
    return node


def _describe_before(before: Node) -> str:
    return "which was something else" if before is NoPlaceError else f"and was {_short_value(before)}"


def _setting_before(saved: StateDict, key: Key) -> Node:
    return saved.get("settings", {}).get(key[0], {}).get(key[1], NoPlaceError)


def _short_value(node: Node) -> str:
    try:
        text = repr(Decoder(torch.device("cpu"), "").decode(node, NoPlaceError))
    except NoPlaceError:
        return "something else"
    return text if len(text) <= 60 else f"{text[:57]}..."


T = TypeVar("T")

_MOST_PARTS = 100_000  # maximum parts of an attribute for a digest before a run
_MOST_BYTES = 1 << 28
_KEPT_ANYWAY = 1 << 20  # bytes: smaller attributes with tensors are kept even if unchanged
_LARGE = 1 << 30  # bytes that cause a message


def _aliases(values: Mapping[str, object]) -> dict[str, str]:
    """Return the paths of attributes that hold the same object as an earlier one, each with the path of the first."""
    first: dict[int, str] = {}
    identities = {path: identity_of(value) for path, value in values.items()}
    known = {path: identity for path, identity in identities.items() if identity is not None}
    return {path: first[identity] for path, identity in known.items() if first.setdefault(identity, path) != path}


class _Places:
    """The objects of a program that attributes are restored in, each for one attribute and its aliases.

    Args:
        aliases: the result of ``_aliases()`` for the saved run
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases
        self._taken: dict[int, str] = {}

    def take(self, path: str, current: Current) -> Current:
        """Return the current object of an attribute, unless that of another one is restored in it."""
        first, identity = self._aliases.get(path, path), identity_of(current)
        is_taken = identity is not None and self._taken.setdefault(identity, first) != first
        return NoPlaceError if is_taken else current


class KeptAttributes(UserAttributes):
    """The users' attributes in the training states of a run: what the program created before it, and what changed.

    If nothing was noted before the run, all attributes count as changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._digests: dict[Key, str] = {}  # of the attributes of moderate size, as the program has created them
        self._settings: dict[Key, Node] = {}  # those that hold only numbers and texts
        self._names: dict[str, set[str]] = {}  # of all attributes that the program had created, by owner
        self._changed: set[Key] = set()  # known to have changed
        self._warned_of: set[str] = set()  # paths of values that states cannot keep, or that are large
        self._in_modules = ModuleAttributes()
        self._left: dict[Key, str | None] | None = None  # digests of the attributes at the end of the run

    def note_created(self, trainer: TrainerLike) -> None:
        """Note the attributes created by the program, before a run changes them."""
        for key, node, found in _moderate_attributes(trainer):
            self._names.setdefault(key[0], set()).add(key[1])
            if found is not None:
                self._digests[key] = found
            if node is not NoPlaceError and is_setting(node):
                self._settings[key] = node

    def note_left(self, trainer: TrainerLike) -> None:
        """Note at the end of a run what it leaves."""
        if trainer.saves_attributes:
            self._left = {key: found for key, _, found in _moderate_attributes(trainer)}
            self._in_modules.note_left(owners_in_modules(trainer, trained_objects(trainer)))

    def undo(self, trainer: TrainerLike) -> None:
        """Reset settings to their created values, and remove attributes that the run has created, if all is as left."""
        if self._left is None:
            return
        now = {key: found for key, _, found in _moderate_attributes(trainer)}
        owners = owners_of_attributes(trainer)
        for key in self._settings.keys() | self._left.keys():
            owner, name = key
            if owner not in owners or now.get(key) != self._left.get(key):
                continue
            held = vars(owners[owner])
            if key in self._settings and self._digests.get(key) != now.get(key):
                decoder = Decoder(trainer.device, "")
                with suppress(NoPlaceError):
                    held[name] = decoder.decode(self._settings[key], held.get(name, NoPlaceError))
            elif name not in self._names.get(owner, ()):
                held.pop(name, None)
        self._in_modules.undo(owners_in_modules(trainer, trained_objects(trainer)))

    def note_modules(self, trainer: TrainerLike) -> None:
        """Note the attributes of modules that have not been noted yet, before a run changes them."""
        if trainer.saves_attributes:
            beside = find_saved_beside(trainer)
            owners = owners_in_modules(trainer, beside.trained)
            self._in_modules.note_created(owners, with_modules(owners, saved_elsewhere(trainer, beside)))

    # ------------------------------------------------------------------------------------------------ saving

    def capture(self, trainer: TrainerLike) -> tuple[StateDict, StateDict]:
        """Return the states of users' attributes: those of all processes, and those of this process. A collective."""
        nodes: dict[Key, Node] = {}
        digests: dict[Key, str | None] = {}
        kept: set[Key] = set()
        beside = find_saved_beside(trainer)
        is_alone, is_saved = trainer.ranks.world_size == 1, saved_elsewhere(trainer, beside)
        shares = sharing_memory(trainer, beside)
        owners = owners_of_attributes(trainer)
        for key, value in attributes_of_users(trainer, beside.trained):
            encoder = Encoder(is_saved, shares=shares)
            node = encoder.encode(value, path_of(key))
            self._print_unsaved(trainer, encoder.unsaved)
            if holds_nothing(node):
                continue
            nodes[key] = node
            before = self._digests.get(key)
            must_compare = not is_alone or (before is not None and key not in self._changed)
            digests[key] = digest(node) if must_compare else None
            if before is None or digests[key] != before:
                self._changed.add(key)
            if key in self._changed or _is_kept_anyway(node):
                kept.add(key)
            encoder.pack()
        self._capture_modules(trainer, is_saved, nodes, digests, kept)
        kept, own = (kept, set()) if is_alone else _agree_on_kept(trainer, kept, digests)
        of_all: StateDict = {
            "kept": _by_owner({key: nodes[key] for key in nodes if key in kept - own}),
            "unchanged": _by_owner({key: digests[key] for key in nodes if key not in self._changed}),
            "settings": _by_owner({k: n for k, n in self._settings.items() if k in nodes and k not in self._changed}),
            "removed": {
                name: sorted(self._names.get(name, set()) - vars(owner).keys()) for name, owner in owners.items()
            },
            "own": _by_owner(dict.fromkeys(sorted(own))),
            "aliases": _aliases({path_of(key): v for key, v in attributes_of_users(trainer, beside.trained)}),
            "has_modules": True,  # earlier versions did not keep the attributes of modules
        }
        self._print_large(trainer, of_all["kept"])
        return of_all, _by_owner({key: nodes[key] for key in nodes if key in own})

    def _capture_modules(
        self,
        trainer: TrainerLike,
        is_saved: Callable[[object], bool],
        nodes: dict[Key, Node],
        digests: dict[Key, str | None],
        kept: set[Key],
    ) -> None:
        """Add the attributes of modules that the run has changed to the nodes of users' attributes."""
        owners = owners_in_modules(trainer, trained_objects(trainer))
        is_saved = with_modules(owners, is_saved)
        for key, value in self._in_modules.changed(owners, is_saved):
            encoder = encoder_of(value, is_saved)
            node = encoder.encode(value, path_of(key))
            if not holds_nothing(node):
                nodes[key] = node
                digests[key] = None if trainer.ranks.world_size == 1 else digest(node)
                self._changed.add(key)
                kept.add(key)
                encoder.pack()
        self._in_modules.note_created(owners, is_saved)  # those that the run has created meanwhile

    def describe_unsaved(self, trainer: TrainerLike) -> str:
        """Return a description of the parts of users' attributes that states cannot hold; an empty text without any."""
        self.note_modules(trainer)  # those that starting events have created
        unsaved: dict[str, str] = {}
        beside = find_saved_beside(trainer)
        is_saved = saved_elsewhere(trainer, beside)
        for key, value in attributes_of_users(trainer, beside.trained):
            encoder = Encoder(is_saved, _MOST_PARTS)
            try:
                encoder.encode(value, path_of(key))
            except TooManyPartsError:
                continue
            unsaved |= encoder.unsaved
        return self._describe_new_unsaved(unsaved)

    def _describe_new_unsaved(self, unsaved: Mapping[str, str]) -> str:
        new = {path: kind for path, kind in unsaved.items() if path not in self._warned_of}
        self._warned_of |= new.keys()
        if not new:
            return ""
        return (
            f"Training states cannot hold {listed([f'{path} ({kind})' for path, kind in new.items()], 10)}: a resumed "
            "run has what the program creates. If that matters, give the object state_dict() and "
            "load_state_dict(state)."
        )

    def _print_unsaved(self, trainer: TrainerLike, unsaved: Mapping[str, str]) -> None:
        if unsaved and (described := self._describe_new_unsaved(unsaved)):
            trainer.print(described)

    def _print_large(self, trainer: TrainerLike, kept: Mapping[str, Mapping[str, Node]]) -> None:
        """Print once which attributes make states large."""
        for owner, states in kept.items():
            for name, node in states.items():
                size = bytes_of_node(node)
                path = path_of((owner, name))
                if size >= _LARGE and f"{path}: size" not in self._warned_of:
                    self._warned_of.add(f"{path}: size")
                    trainer.print(f"Each training state holds {path}, {size / 1e9:.1f} GB.")

    def changed_modules(self, trainer: TrainerLike) -> dict[str, nn.Module]:
        """Return the modules in attributes of the trainer that no optimizer trains, but that the run has changed."""
        changed = {}
        for key, value in attributes_of_users(trainer, trained_objects(trainer)):
            before = self._digests.get(key)
            if key[0] or not isinstance(value, nn.Module) or before is None:
                continue
            if key in self._changed or digest(Encoder().encode(value, key[1])) != before:
                changed[key[1]] = value
        return changed

    # ---------------------------------------------------------------------------------------------- resuming

    def restore(
        self, trainer: TrainerLike, saved: StateDict, own: StateDict | None, source: str, *, is_final: bool
    ) -> None:
        """Restore the users' attributes, in place if the program has created them."""
        states = _merged(saved.get("kept", {}), own or {})
        if not is_final:
            self._restore_in_owners(trainer, copy.deepcopy(states), saved, source)
            return
        # Copies that starting events make of modules have the attributes that the program has created.
        lost = self._restore_in_modules(trainer, states, source)
        lost += self._restore_in_owners(trainer, states, saved, source)
        owners = owners_of_attributes(trainer)
        for owner, names in saved.get("removed", {}).items():
            for name in names if owner in owners else ():
                vars(owners[owner]).pop(name, None)
        self._restore_settings(trainer, saved, owners)
        if saved.get("has_modules"):
            owners_of_parts = owners_in_modules(trainer, trained_objects(trainer))
            self._in_modules.reset_unchanged(owners_of_parts, self.names_in(saved))
        _say_what_is_lost(saved, own, lost, source)
        self._say_what_differs(trainer, saved)

    def _restore_in_owners(
        self, trainer: TrainerLike, states_by_owner: Mapping[str, Mapping[str, Node]], saved: StateDict, source: str
    ) -> list[str]:
        """Restore the attributes of the trainer and of callbacks, and return the paths of those without a place."""
        lost = []
        owners, beside = owners_of_attributes(trainer), find_saved_beside(trainer)
        aliases: Mapping[str, str] = saved.get("aliases", {})
        shares, places = sharing_memory(trainer, beside), _Places(aliases)
        for key, value in attributes_of_users(trainer, beside.trained):
            if key[1] not in states_by_owner.get(key[0], {}):
                places.take(path_of(key), value)  # it stays as it is
        restored: dict[str, object] = {}
        for owner, states in states_by_owner.items():
            if owner not in owners:
                continue  # another message reports the missing callback
            held, unsaved = vars(owners[owner]), unsaved_attribute_names(owners[owner])
            for name, node in states.items():
                if name in unsaved:
                    continue  # the run that saved the state kept it
                path = path_of((owner, name))
                current = places.take(path, held.get(name, NoPlaceError))
                first = aliases.get(path, "")
                is_missing = identity_of(held.get(name)) is None
                if is_missing and first in restored and not isinstance(restored[first], torch.Tensor):
                    held[name] = restored[first]  # the saved run had created one object for both
                    continue
                try:
                    held[name] = restored[path] = Decoder(trainer.device, source, shares).decode(node, current)
                except NoPlaceError:
                    lost.append(path)
        return lost

    def _restore_in_modules(
        self, trainer: TrainerLike, states_by_owner: Mapping[str, Mapping[str, Node]], source: str
    ) -> list[str]:
        """Restore the attributes of modules, and return the paths of those that have no place in the program."""
        lost = []
        for owner, module in owners_in_modules(trainer, trained_objects(trainer)).items():
            for name, node in states_by_owner.get(owner, {}).items():
                if name in OF_EVERY_MODULE:
                    continue  # a mark, kept by an earlier version
                held = place_of(module, name)
                current = held.get(name, NoPlaceError)
                if shares_memory_with_weights(module, current):
                    current = NoPlaceError
                try:
                    held[name] = Decoder(trainer.device, source).decode(node, current)
                except NoPlaceError:
                    lost.append(path_of((owner, name)))
        return lost

    def _restore_settings(self, trainer: TrainerLike, saved: StateDict, owners: Mapping[str, object]) -> None:
        """Reset attributes that the saved run had not changed to their created values: events may have changed them."""
        for owner, digests in saved.get("unchanged", {}).items():
            for name in digests:
                if owner in owners and (owner, name) in self._settings:
                    held = vars(owners[owner])
                    decoder = Decoder(trainer.device, "")
                    with suppress(NoPlaceError):
                        held[name] = decoder.decode(self._settings[owner, name], held.get(name, NoPlaceError))

    def _say_what_differs(self, trainer: TrainerLike, saved: StateDict) -> None:
        """Report attributes that the program creates differently from the saved run, which had not changed them."""
        kept = {(owner, name) for owner, states in saved.get("kept", {}).items() for name in states}
        others = [
            (owner, name)
            for owner, digests in saved.get("unchanged", {}).items()
            for name, before in digests.items()
            if self._digests.get((owner, name), before) != before
        ]
        settings = {key: self._settings[key] for key in others if key not in kept and key in self._settings}
        for key in [key for key, node in settings.items() if key in self.compared or is_moved(saved, key, node)]:
            del settings[key]
        if settings:
            trainer.print(
                f"Different from the run that saved the state: {describe_changes(saved, settings)}. The new values "
                "hold."
            )
        if restored := [path_of(key) for key in others if key in kept]:
            trainer.print(
                f"The program has {listed(restored, 10)} unlike the run that saved the state. The saved values are "
                "restored."
            )
        if large := [path_of(key) for key in others if key not in kept and key not in self._settings]:
            warn_outside(
                f"The program creates {listed(large, 10)} unlike the run that saved the state. The state does not hold "
                "them, as the run had not changed them. Create them from the same data and seed for the same results."
            )


def _moderate_attributes(trainer: TrainerLike) -> Iterator[tuple[Key, Node, str | None]]:
    """Yield users' attributes as nodes with their digests; of large ones without, and of long ones ``NoPlaceError``."""
    beside = find_saved_beside(trainer)
    is_saved, shares = saved_elsewhere(trainer, beside), sharing_memory(trainer, beside)
    for key, value in attributes_of_users(trainer, beside.trained):
        try:
            node = Encoder(is_saved, _MOST_PARTS, shares).encode(value, key[1])
        except TooManyPartsError:
            yield key, NoPlaceError, None
            continue
        is_large = bytes_of_node(node) > _MOST_BYTES and not isinstance(value, nn.Module)
        yield key, node, None if is_large else digest(node)


def _is_kept_anyway(node: Node) -> bool:
    """Whether a node has tensors (the program may have drawn them at random) and is small enough to be stored."""
    return not is_setting(node) and bytes_of_node(node) <= _KEPT_ANYWAY


def _agree_on_kept(trainer: TrainerLike, kept: set[Key], digests: dict[Key, str | None]) -> tuple[set[Key], set[Key]]:
    """Return the attributes that at least one process keeps, and those among them that differ between processes."""
    by_rank = trainer.all_gather_object((kept, digests))
    kept = set().union(*(of_rank for of_rank, _ in by_rank))
    first = by_rank[0][1]
    return kept, {key for key in kept if first.get(key) is None or any(of.get(key) != first[key] for _, of in by_rank)}


def _say_what_is_lost(saved: StateDict, own: StateDict | None, lost: list[str], source: str) -> None:
    if lost:
        warn_outside(
            f"{source!r} holds objects that only the program can create, but has not: {', '.join(lost)}. Create them "
            "in the constructor or at the start of the run, as in the run that saved the state."
        )
    by_rank = [path_of((owner, name)) for owner, names in saved.get("own", {}).items() for name in names]
    if by_rank and own is None:
        warn_outside(
            f"These attributes differed between the processes, whose number has changed: {listed(by_rank, 10)}. They "
            "are as the program creates them. register_for_checkpointing() takes an object whose state_dict() gathers "
            "the parts of all."
        )


def _by_owner(values: Mapping[Key, T]) -> dict[str, dict[str, T]]:
    result: dict[str, dict[str, T]] = {}
    for (owner, name), value in values.items():
        result.setdefault(owner, {})[name] = value
    return result


def _merged(first: Mapping[str, dict[str, T]], second: Mapping[str, dict[str, T]]) -> dict[str, dict[str, T]]:
    return {owner: {**first.get(owner, {}), **second.get(owner, {})} for owner in dict.fromkeys([*first, *second])}
