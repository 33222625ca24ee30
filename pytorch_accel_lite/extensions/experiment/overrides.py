"""Overriding values of an experiment file: by ``--train.num_epochs 5`` on the command line, or by a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from pytorch_accel_lite.extensions.experiment.yaml_files import (
    PARTS,
    Document,
    ExperimentError,
    load_yaml,
    merge,
    short_key,
)

#: The sources of values that override those of a file.
COMMAND_LINE, OVERRIDES = OVERRIDING = ("command line", "overrides")


def apply_overrides(document: Document, overrides: Mapping[str, Any] | Sequence[str]) -> None:
    """Override values of a document, by a mapping of keys or by arguments of the command line."""
    is_mapping = isinstance(overrides, Mapping)
    for key, value in overrides.items() if isinstance(overrides, Mapping) else _read_arguments(overrides):
        full_key = "train.resume_from" if key == "resume" else key
        _override(document, full_key, value, OVERRIDES if is_mapping else COMMAND_LINE)


def _read_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the keys and values in the arguments of a command line.

    The value of an argument stays text until its type is known. A value within an argument is read as YAML.
    """
    rest = iter(arguments)
    for argument in rest:
        option, equals, text = argument.partition("=")
        key = option.removeprefix("--")
        if not option.startswith("--"):
            raise ExperimentError(f"{argument} is not an option. Options begin with --, as in --train.num_epochs 5.")
        value = text if equals else "true" if key == "overwrite" else next(rest, None)
        if value is None:
            raise ExperimentError(f"{option} needs a value, as in --train.num_epochs 5.")
        part = next((part for part in PARTS if f"{key}.".startswith(f"{part}.")), key.partition(".")[0])
        depth = key.count(".") - part.count(".")
        is_within = depth > 1 or key.endswith("+") or value.startswith(("[", "{")) or (key in PARTS and value == "null")
        try:
            yield key, load_yaml(value) if is_within else value
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or error
            raise ExperimentError(f"{COMMAND_LINE}: {option} {value} is not YAML: {problem}. Quote text.") from None


def _override(document: Document, key: str, value: object, source: str) -> None:
    """Override the value of a key such as ``optimizer.lr``; ``callbacks.x`` is an argument of the last callback."""
    first, *rest = key.split(".")
    callbacks = document.content.get("callbacks")
    if first == "callbacks" and rest and isinstance(callbacks, list) and callbacks:
        last = callbacks[-1]
        callbacks[-1] = {"class_path": last} if isinstance(last, str) else last
        merge(callbacks[-1], _nested(last, rest, value), key, document.inherited)
        document.locations[f"callbacks.{len(callbacks) - 1}.{'.'.join(rest)}"] = source
    else:
        document.update(_nested(document.content, [first, *rest], value), {short_key(key): source})


def _nested(existing: Any, names: Sequence[str], value: Any) -> Any:
    """Wrap a value in nested dicts by the parts of its key. Keys within a class name its arguments.

    Args:
        existing: the contents that will be updated with the value, which show where classes are
    """
    if not names:
        return value
    result = {"class_path": existing} if isinstance(existing, str) else {}
    existing = result or (existing if isinstance(existing, Mapping) else {})
    if "class_path" in existing and names[0] not in ("class_path", "init_args"):
        names = ["init_args", *names]
    first, *rest = names
    return {**result, first: _nested(existing.get(first), rest, value)}
