"""What ``train FILE --help`` prints: the values that a file sets and the further keys it may contain, by group."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytorch_accel_lite import callbacks
from pytorch_accel_lite.extensions.experiment.yaml_files import ExperimentError
from pytorch_accel_lite.utils import suggest

_WIDEST = 100
_OTHERS = "output"


class Option(NamedTuple):
    """An option of the command line, which is also a key of the file."""

    key: str
    kind: str
    text: str
    value: str
    is_set: bool

    @property
    def group(self) -> str:
        """The part of the file that the option belongs to."""
        return self.key.rpartition(".")[0] or (self.key if self.key == "callbacks" else _OTHERS)

    @property
    def name(self) -> str:
        """The name of the option within its group."""
        return self.key.rpartition(".")[2]


class OptionGroup(NamedTuple):
    """A part of the file, and the options that it may contain."""

    title: str
    text: str
    options: list[Option]


def read_options(
    help_text: str, values: Mapping[str, Any], keys_in_file: Iterable[str]
) -> tuple[list[Option], dict[str, str]]:
    """Read the options, and the titles of their groups, in a help text whose lines are not wrapped."""
    found: list[Option] = []
    titles: dict[str, str] = {}
    title, set_here = "", {*keys_in_file}
    entry = re.compile(r"^  --(\S+?),? .*\n? +(.*)$|^(\S.*):$", re.MULTILINE)
    for key, text, heading in entry.findall(help_text):
        if heading:
            title = heading
            continue
        if key.endswith(".class_path"):
            continue
        *_, kind = re.findall(r"\((?:required, )?type: (.*?)(?:, default: .*)?\)$", text) or [""]
        text = re.sub(r"\s*\((?:required, )?type: .*\)$", "", text)
        option = Option(key, _plain_type(kind), without_markup(text), as_text(values.get(key)), key in set_here)
        found.append(option)
        titles.setdefault(option.group, title)
    return found, titles


def without_markup(text: str) -> str:
    """Return the text of a docstring without markup, and without defaults, which the help shows anyway."""
    for pattern, replacement in (
        (r"\s*\(default: [^()]*(?:\([^()]*\))?[^()]*\)|\s*Default: \S+$", ""),
        (r":\w+:`~?(?:[\w.]+\.)?([^`<]+?)(?:\s*<[^`]*>)?`", r"\1"),
        (r"`([^`<]+?)\s*<[^`]*>`_*", r"\1"),
        (r"``([^`]*)``|`([^`]*)`_*", r"\1\2"),
        (r"\s+", " "),
    ):
        text = re.sub(pattern, replacement, text)
    return text.strip()


def _plain_type(kind: str) -> str:
    kind = re.sub(r"\b(?:[a-z_]\w*\.)+", "", kind).replace("Untyped", "Any").replace("NoneType", "null")
    if outer := re.fullmatch(r"(Union|Optional)\[(.*)\]", kind):
        parts = re.split(r", (?![^\[]*\])", outer[2])  # the commas outside of brackets
        kind = " | ".join([*parts, "null"] if outer[1] == "Optional" else parts)
    return kind


def as_text(value: Any) -> str:
    """Return a value as it would be in a file, with classes by their names."""
    if hasattr(value, "class_path"):
        return str(value.class_path).rpartition(".")[2]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {as_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_text, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(value))


def overview(groups: Mapping[str, OptionGroup], file: str) -> str:
    """Return the values that a file sets, and the names of the further options that it may contain."""
    text = f"The values that {file} sets. An option replaces a value, as in --train.num_epochs 5."
    lines = [*_filled(text), ""]
    for name, group in groups.items():
        lines.append(f"{name}: {group.title}" if group.title else name)
        for option in [option for option in group.options if option.is_set]:
            lines += _row(f"  --{option.key} {option.value}", option.text)
        if others := [option.name for option in group.options if not option.is_set]:
            lines += _filled(f"also {', '.join(others)}", "    ")
    lines += ["", *_filled("To read about a group or an option, add its name: --help train")]
    return "\n".join(lines)


def describe_options(groups: Mapping[str, OptionGroup], wanted: str) -> str:
    """Return the description of a group, or of a single option.

    Raises:
        ExperimentError: if there is no such group or option
    """
    wanted = wanted.lstrip("-")
    chosen = groups.get(wanted)
    options = [option for group in groups.values() for option in group.options if option.key == wanted]
    if chosen is None and not options:
        keys = [*groups, *(option.key for group in groups.values() for option in group.options)]
        hint = suggest(wanted, keys, 0.5) or f" There are the groups {', '.join(groups)}."
        raise ExperimentError(f"{wanted!r} is not a group of options, nor one of them.{hint}")
    lines: list[str] = []
    if chosen is not None:
        lines += [*_filled(f"{wanted}: {chosen.title}".removesuffix(": ")), *_filled(chosen.text), ""]
        options = chosen.options
    for option in options:
        lines += [f"--{option.key} {option.value}", *_filled(option.text, "    "), *_filled(option.kind, "    type: ")]
    if wanted == "callbacks":
        kinds = {name for name in callbacks.__all__ if name.endswith("Callback")} - {"TrainerCallback"}
        names = ", ".join(sorted(kinds))
        lines += ["", "To add one: --callbacks+ EarlyStoppingCallback. There are:", *_filled(names, "    ")]
    return "\n".join(lines)


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST)


def _filled(text: str, indent: str = "") -> list[str]:
    """Wrap a text. If the indent contains a word, the lines after the first have as many spaces instead."""
    blank = " " * len(indent)
    if not text:
        return []
    return textwrap.wrap(
        text, _columns(), initial_indent=indent, subsequent_indent=blank, break_long_words=False, break_on_hyphens=False
    )


def _row(start: str, text: str, column: int = 38) -> list[str]:
    """Return one line with an option and the beginning of its description."""
    if len(start) > column - 2:
        return _filled(start.strip(), "  ")
    first = re.split(r"(?<=[^.].)[.;:] ", text, maxsplit=1)[0].removesuffix(".")
    return [f"{start:{column}}{textwrap.shorten(first, _columns() - column, placeholder=' ...')}".rstrip()]


def group_options(
    options: Sequence[Option], titles: Mapping[str, str], classes: Mapping[str, str]
) -> dict[str, OptionGroup]:
    """Return the groups of options by name.

    Args:
        titles: for each group, the first sentence of the docstring of its class or function
        classes: for each group, the path of its class or function
    """
    names = dict.fromkeys([*classes, *(option.group for option in options)])
    return {
        name: OptionGroup(
            classes.get(name, ""), _sentence(titles.get(name, "")), [o for o in options if o.group == name]
        )
        for name in sorted(names, key=lambda name: name == _OTHERS)
    }


def _sentence(text: str) -> str:
    is_text = text and text != "options" and not text.startswith("<")
    return without_markup(text).rstrip(".:") + "." if is_text else ""


def all_keys(content: Mapping[str, Any], under: str = "") -> Iterator[str]:
    """Yield the keys of nested contents, as options name them."""
    for name, value in content.items():
        key = f"{under}{name}"
        yield key.replace(".init_args", "")
        if isinstance(value, Mapping):
            yield from all_keys(value, f"{key}.")
