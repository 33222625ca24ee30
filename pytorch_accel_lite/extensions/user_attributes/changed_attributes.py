"""Settings in users' attributes whose values a resumed program has changed, for messages."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pytorch_accel_lite.extension_tools.arguments_and_errors import may_differ
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extensions.user_attributes.attribute_owners import Key, path_of
from pytorch_accel_lite.extensions.user_attributes.plain_objects import Decoder, Node, NoPlaceError


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
