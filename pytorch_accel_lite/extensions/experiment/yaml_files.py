"""Reading experiment files: YAML, files that build on others, and the location of each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from pytorch_accel_lite.extension_tools.arguments_and_errors import checked_by
from pytorch_accel_lite.utils import import_extra

#: The parts of an experiment that are specified by a class or function and its arguments.
PARTS = (
    "model", "loss_func", "optimizer", "scheduler", "data.train", "data.eval", "data.test", "trainer", "accelerator",
)  # fmt: skip
#: Files in the folder of a run: the resolved experiment, and whether greater values are better, by metric.
RESOLVED = "experiment.yaml"
DIRECTIONS = "directions.json"
_MAX_REPEATED = 10_000  # values that aliases may repeat in a file


class ExperimentError(ValueError):
    """An experiment's file or its overrides are wrong. The message names the file and line, or the key."""


def was_raised_by_us(error: Exception) -> bool:
    """Whether an error comes from a check of this package, so that its message suffices."""
    return checked_by(error, FileNotFoundError, NotADirectoryError) != ""


@dataclass(eq=False, repr=False)
class Document:
    """The contents of an experiment file and of the files that it builds on.

    Args:
        content: the values, as nested dicts
        locations: file and line of each key, by the key's short form, such as ``"optimizer.lr"``
        inherited: full keys of arguments that were specified for a class that has been replaced
    """

    content: dict[str, Any] = field(default_factory=dict)
    locations: dict[str, str] = field(default_factory=dict)
    inherited: set[str] = field(default_factory=set)

    def update(self, content: Mapping[str, Any], locations: Mapping[str, str]) -> None:
        """Override values, argument by argument; ``key+`` adds to the list ``key``."""
        merge(self.content, _expanded(content), "", self.inherited)
        self.locations |= locations

    def locate(self, key: str) -> str:
        """Return the start of an error message about a key: its file and line, if it is in a file, and the key."""
        location = self.locations.get(short_key(key))
        return f"{location}: {short_key(key)}" if location else short_key(key)


def short_key(key: str) -> str:
    """Return a key as it is written on the command line: ``optimizer.lr`` for ``optimizer.init_args.lr``."""
    return key.replace(".init_args.", ".").removesuffix(".init_args").removesuffix(".class_path").removesuffix("+")


#: Schedulers that set learning rates of their own, whatever the rate of the optimizer is.
SETTING_RATES = ("OneCycleLR", "CyclicLR")


class ClassPath(str):
    """A setting that is the path of a class or function. The name of a file, a plain ``str``, may look the same."""


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested settings by key; a class is the value of the key above its arguments."""
    if isinstance(value, Mapping) and "class_path" in value:
        yield key, ClassPath(value["class_path"])
    if isinstance(value, Mapping) and value.keys() & {"class_path", "init_args"}:
        value = value.get("init_args") or {}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "class_path" in item for item in value):
        value = _by_class(value)
    if not isinstance(value, Mapping):
        yield short_key(key), value
        return
    for name, inner in value.items():
        yield from flat(inner, f"{key}.{name}" if key else str(name))


def _by_class(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a list of classes with their arguments as a dict whose keys are the names of the classes."""
    named: dict[str, Any] = {}
    for item in items:
        name = item["class_path"].rpartition(".")[2]
        count = sum(key.partition("#")[0] == name for key in named)
        named[f"{name}#{count + 1}" if count else name] = item
    return named


def read(path: Path) -> Document:
    """Read an experiment file.

    Raises:
        ExperimentError: if the file is missing, is not YAML, has a key twice, or builds on itself
    """
    document = Document()
    _read_into(document, path, ())
    return document


def _read_into(document: Document, path: Path, above: tuple[Path, ...], named_at: str = "") -> None:
    """Read a file into a document.

    Args:
        above: the chain of files that build on this one
        named_at: the location at which the last file of the chain names this one, for errors
    """
    if path.resolve() in above:
        chain = " -> ".join(file.name for file in (*above, path))
        raise ExperimentError(f"{named_at}{path} builds on itself: {chain}. Remove one of these references.")
    content, locations = _load(path, named_at)
    bases = content.pop("base", None) or []
    bases = bases if isinstance(bases, list) else [bases]
    if not all(isinstance(base, str) for base in bases):
        raise ExperimentError(f"{locations['base']}: base={bases[0]!r} must be the path of a file, or a list of paths.")
    for base in bases:
        _read_into(document, path.parent / base, (*above, path.resolve()), f"{locations['base']}: ")
    document.update(content, locations)


def _expanded(content: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Return contents in which each part has ``class_path`` and ``init_args``."""
    full: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{under}.{name}" if under else name
        if key in PARTS and isinstance(value, str):
            value = {"class_path": value}
        elif key in PARTS and isinstance(value, Mapping) and not value.keys() & {"class_path", "init_args"}:
            value = {"init_args": dict(value)}
        elif key == "data" and isinstance(value, Mapping):
            value = _expanded(value, key)
        full[name] = value
    return full


def _load(path: Path, named_at: str) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{named_at}{path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    locations: dict[str, str] = {}
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        for number, (key, location) in enumerate(_locations(node, path) if node else ()):
            if number > len(text) + _MAX_REPEATED:  # without aliases, each value takes at least one character
                raise ExperimentError(f"{location}: aliases (*) repeat more than {_MAX_REPEATED:,} values. Use fewer.")
            locations.setdefault(short_key(key), location)
        content = load_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ExperimentError(f"{path}{line}: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise ExperimentError(f"{path} is nested too deeply, or has an alias (*) of what contains it.") from error
    if not isinstance(content, dict):
        raise ExperimentError(f"{path} must contain keys and values, such as 'model: my_module.MyModel'.")
    return content, locations


def load_yaml(text: str) -> Any:
    """Return the value of a text in YAML, in which ``1e-3`` is a number, unlike in YAML 1.1."""
    return import_extra("jsonargparse", "cli", "An experiment file").get_loader("yaml")(text)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes text that ``load_yaml`` would read as a number."""


# Texts that look like numbers, but not to YAML 1.1, so that PyYAML would not quote them.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+]?[0-9]+)?)$"),
    list("-+.0123456789"),
)


# Overrides in Python may have values of these types.
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))
_Dumper.add_multi_representer(np.generic, lambda dumper, number: dumper.represent_data(number.item()))


def dump_yaml(content: Any) -> str:
    """Return contents as YAML, which ``load_yaml`` reads back unchanged.

    Raises:
        ExperimentError: if the contents have an object that YAML cannot represent
    """
    try:
        return str(yaml.dump(content, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False))
    except yaml.representer.RepresenterError as error:
        raise ExperimentError(f"{error.args[1]!r} cannot be written into a file.") from error


def _locations(node: Any, path: Path, key: str = "", location: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key and list item under a node, by its path, with its file and line; aliased nodes are included.

    Args:
        location: the location of the key of the node

    Raises:
        ExperimentError: if a key occurs twice
    """
    values: list[tuple[str, str, Any]] = []
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:  # a name that is not a scalar is an error when the file is loaded
            label = str(name.value) if isinstance(name, yaml.ScalarNode) else "?"
            values.append((label, f"{path}, line {name.start_mark.line + 1}", value))
    elif isinstance(node, yaml.SequenceNode):
        values = [(str(number), location, value) for number, value in enumerate(node.value)]
    seen = set()
    for label, inner_location, value in values:
        inner = f"{key}.{label}" if key else label
        if inner in seen:
            raise ExperimentError(f"{inner_location}: {inner} is there twice. Remove one of them.")
        seen.add(inner)
        yield inner, inner_location
        yield from _locations(value, path, inner, inner_location)


def merge(base: dict[str, Any], over: Mapping[str, Any], key: str, inherited: set[str]) -> None:
    """Override values in nested dicts, in place; the arguments of a class that is replaced go with it.

    Args:
        key: the key of ``base`` in the document
        inherited: gets the full keys of arguments of replaced classes
    """
    named = {"class_path"} & base.keys() & over.keys()
    if named and base["class_path"] != over["class_path"]:
        nested = ".init_args." in key  # the class is the value of an argument, so only the parser knows its arguments
        arguments = base.pop("init_args", None) if nested else base.get("init_args")
        inherited |= {f"{key}.init_args.{name}" for name in arguments or {}}
    for name, value in over.items():
        inner = f"{key}.{name}" if key else name
        inherited.discard(inner)
        if str(name).endswith("+"):
            added = value if isinstance(value, list) else [value]
            base[name[:-1]] = [*(base.get(name[:-1]) or []), *added]
        elif isinstance(value, Mapping) and isinstance(base.get(name), dict):
            merge(base[name], value, inner, inherited)
        else:
            base[name] = value
