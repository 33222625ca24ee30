"""What an experiment's users read: errors of the parser in terms of the file, help, and comments."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pytorch_accel_lite.base.other_libraries import suggest
from pytorch_accel_lite.experiment.importing import import_path
from pytorch_accel_lite.experiment.yaml_files import Document, short

#: How the parser begins the text that it writes in place of an object that has none.
UNWRITABLE = "Unable to serialize instance"
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "NoneType": "null",
    "list": "a list",
    "Sequence": "a list",
    "dict": "keys and values",
    "function": "the path of a function",
}
_FURTHER = {
    r"^Not of type Expression": ", or an expression",
    r"^Type \S*Callable\[.*\] expects a function or a callable class": " or the path of a function",
}
_UNWANTED_HELP = {
    r"  --print_config .*?(?=\n  -)\n": "",
    r"  --[\w.]+ CONFIG\s+Path to a configuration file\.\n": "",
    r"  --[\w.]+\.help .*?exit\.\n": "",
    r",\s+known\s+subclasses:[^)]*\)": ")",
    r"<function (\w+) at 0x\w+>": r"\1",
    r"\.init_args(?=[. ])": "",
}
_UNWANTED_IN_COMMENTS = {
    r":\w+:`~?(?:[^`]*\.)?([^`.]*)`": r"\1",
    r"``([^`]*)``": r"\1",
    r"(, default: [^)]*)?(, known subclasses: [^)]*)?\)$": ")",
    r"\((required, )?type: ": r"(\1",
}


def explain(message: str, document: Document, unknown: Callable[[str], str]) -> str:
    """Return an error of the parser's in terms of the file.

    :param unknown: returns why a key is not known
    """
    if missing := re.search(r"arguments are required: (.*)", message):
        keys = missing[1].split(", ")
        owner = keys[0].partition(".init_args.")[0]
        return f"{document.place(owner)} needs {' and '.join(map(short, keys))}, without a default."
    if strange := re.search(r"unrecognized arguments: --([^\s=]*)", message):
        return f"--{short(strange[1])} {unknown(strange[1])}"
    if message.startswith("unrecognized arguments"):
        return f"{message}. Options begin with --, as in --train.num_epochs 5."
    if lacking := re.search(r"argument --(\S+): expected one argument", message):
        return f"--{short(lacking[1])} needs a value, as in --train.num_epochs 5."
    keys = re.findall(r'Parser key "([^"]+)"', message)
    if option := re.search(r"Option '([^']+)' is not accepted", message):
        return _explain_option(message, document, keys, option[1])
    return _explain_value(message, document, keys)


def _explain_option(message: str, document: Document, keys: Sequence[str], option: str) -> str:
    place = _deepest(document, [*keys, option])
    found = re.findall(r"given class_path '([^']+)'", message)
    if not found:
        return f"{place} is not an argument."
    names = inspect.signature(import_path(document, keys[0], found[-1])).parameters
    hint = suggest(option, names) or f" There are: {', '.join(names)}."
    return f"{place} is not an argument of {found[-1]}.{hint}"


def _explain_value(message: str, document: Document, keys: Sequence[str]) -> str:
    value = re.search(r"(?:Got|Given) value: (.*?)(?=\n +(?:- |Given value)|\Z)", message, re.DOTALL)
    message = message[: value.end()] if value else message  # of an item in a list, what follows is about the list
    expected = re.findall(r"Expected an? (<class '[^']+'>|.*?)(?:\.|$)", message, re.MULTILINE)
    lines = [line.strip() for line in message.splitlines()]
    place = _deepest(document, keys)
    if not value or not expected:
        return f"{place}: {' '.join(line for line in lines if 'Parser key' not in line)}"
    names = [re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind) for kind in expected]
    names = ["function" if name.startswith("dot import path") else name for name in names]
    kinds = " or ".join(dict.fromkeys(_KINDS.get(name, name) for name in names))
    further = [line[2:] for line in lines if re.match("- (?!Expected a|Does not validate)", line)]
    for pattern, words in _FURTHER.items():
        further = [re.sub(pattern, words, line) for line in further]
    reasons = "".join(f". {reason}" if reason[0].isalnum() else reason for reason in further)
    if kinds == "text" and re.fullmatch(r"True|False|[\d.e+-]+", value[1]):  # what YAML has read as something else
        return f"{place}={value[1]} must be text: put it in quotes."
    text = f"{place}={value[1]!r} must be {kinds}{reasons}".rstrip(".")
    return text if text.endswith("?") else f"{text}."


def _deepest(document: Document, keys: Sequence[str]) -> str:
    """Return the place of the last key, which may belong to an item of the first."""
    if len(keys) < 2:
        return document.place(keys[0]) if keys else "The experiment"
    first, last = keys[0], keys[-1]
    inner = [key for key in document.places if key.startswith(f"{first}.") and key.endswith(f".{last}")]
    return f"{document.places[inner[0]]}: {last}" if inner else f"{document.place(first)}: {last}"


def tidy_help(text: str) -> str:
    """Return the help of the parser without what only its authors understand."""
    for pattern, replacement in _UNWANTED_HELP.items():
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text


def without_unwritable(content: Any) -> Any:
    """Return nested contents without the values that could not be written."""
    if isinstance(content, dict):
        written = {key: value for key, value in content.items() if not str(value).startswith(UNWRITABLE)}
        return {key: without_unwritable(value) for key, value in written.items()}
    return [without_unwritable(value) for value in content] if isinstance(content, list) else content


def tidy_comments(text: str) -> Iterable[str]:
    """Yield the lines of a commented file with comments that fit a terminal, without the markup of docstrings."""
    comment: list[str] = []
    # What cannot be written, with its comment, and the lines on which it goes on.
    text = re.sub(rf"^( *)(# .*\n\1)*\w+: ['\"]?{UNWRITABLE}.*\n(?:\1 .*\n)*", "", text, flags=re.MULTILINE)
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line)
            continue
        words = " ".join(part.lstrip()[1:].strip() for part in comment)
        if words not in ("", "options") and not re.fullmatch(r"<.* at 0x\w+>", words):  # a function without a docstring
            for pattern, replacement in _UNWANTED_IN_COMMENTS.items():
                words = re.sub(pattern, replacement, words)
            indent = comment[0].partition("#")[0] + "# "
            yield from textwrap.wrap(words, 80, initial_indent=indent, subsequent_indent=indent)
        comment = []
        yield line
