"""Text for users: metrics, lists of names, wrapped lines, representations with short values and hidden secrets."""

from __future__ import annotations

import functools
import inspect
import os
import re
import reprlib
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TextIO

import numpy as np
import torch
from torch import nn

from pytorch_accel_lite.base.nested_values import to_number


def escape_unprintable(text: object, keeps: str = "") -> str:
    """Return a user's text for display in a line, with unprintable characters escaped as by ``repr``.

    Line breaks would break a table, terminal codes would move the cursor, and lone surrogates fit into no file.

    Args:
        keeps: unprintable characters that stay unchanged
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keeps else c.encode("unicode_escape").decode() for c in text)


def format_metric(value: object) -> str:
    """Format a value for display: floats, including those of numpy and in scalar tensors, with six digits."""
    value = to_number(value)
    return f"{value:.6g}" if isinstance(value, float) else escape_unprintable(value)


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a text to the width of the terminal, or leave it in one line if the output is not a terminal.

    Args:
        indent: prefix of all lines after the first
    """
    if not is_terminal(sys.stdout):
        return text
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def listed(names: Iterable[object], most: int = 5) -> str:
    """Return the first of some names, and how many more there are."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; ``None`` is not one."""
    return bool(stream is not None and stream.isatty())


_WIDTH = 80
_SECRET = re.compile(
    r"(api|access|private|secret|auth)_?key|token$|secret|passw|passphrase|credential|authorization", re.IGNORECASE
)
_IN_URL = re.compile(r"(://[^/:@\s]*:)[^/@\s]+@")


class _Short(reprlib.Repr):
    """Represents any value in one short line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxtuple = self.maxlist = self.maxdict = 8
        self.maxstring = self.maxother = 60

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(_IN_URL.sub(r"\1***@", x), level)

    def repr_dict(self, x: Mapping[object, object], level: int) -> str:
        if x and level <= 0:
            return "{...}"
        items = islice(x.items(), self.maxdict)
        shown = [f"{self.repr1(key, level - 1)}: {self.named(key, value, level - 1)}" for key, value in items]
        return f"{{{', '.join(shown)}{', ...' if len(x) > self.maxdict else ''}}}"

    def named(self, name: object, value: object, level: int) -> str:
        """Represent a value, hiding it if its name suggests a secret."""
        is_secret = isinstance(name, str) and _SECRET.search(name) and isinstance(value, (str, bytes))
        return "'***'" if is_secret else self.repr1(value, level)

    def repr_instance(self, x: object, level: int) -> str:
        name = type(x).__name__
        if isinstance(x, os.PathLike):
            return self.repr1(os.fspath(x), level)
        if isinstance(x, functools.partial):
            return f"partial({self.repr1(x.func, level)}, ...)"
        if isinstance(x, np.generic):
            return self.repr1(x.item(), level)
        if isinstance(x, torch.Tensor):  # no values: they may be on a device
            return f"{name}(shape={tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')} on {x.device})"
        if isinstance(x, np.ndarray):
            return f"{name}(shape={x.shape}, {x.dtype})"
        if isinstance(x, Mapping):
            return f"{name}({self.repr_dict(x, level)})"
        if isinstance(x, tuple):
            return f"{name}{self.repr_tuple(x, level)}"
        if isinstance(x, type) or inspect.isroutine(x):
            return str(x.__name__)
        is_large = isinstance(x, nn.Module) and any(x.children())
        text = "\n" if is_large else super().repr_instance(x, level)
        is_readable = len(text) < self.maxother and "\n" not in text and " at 0x" not in text
        return text if is_readable else f"{name}(...)"


_short_repr = _Short()


def short_repr(value: object, name: str = "") -> str:
    """Represent a value in one short line, abbreviating long values and hiding secrets.

    Args:
        name: name of the argument or setting, which shows whether it is a secret
    """
    return _short_repr.named(name, value, _short_repr.maxlevel)


def call_repr(name: str, arguments: Mapping[str, object]) -> str:
    """Represent a call with these arguments, each abbreviated."""
    return join_wrapped(f"{name}(", [f"{key}={short_repr(value, key)}" for key, value in arguments.items()], ")")


def join_wrapped(opening: str, parts: Iterable[str], closing: str) -> str:
    """Join parts with commas, in one line if it is short enough, otherwise over several indented lines."""
    parts = list(parts)
    line = f"{opening}{', '.join(parts)}{closing}"
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    lines: list[str] = []
    for part in parts:
        block = part.replace("\n", "\n    ")
        if lines and "\n" not in lines[-1] + block and len(lines[-1]) + len(block) + 2 <= _WIDTH:
            lines[-1] += f" {block},"
        else:
            lines.append(f"    {block},")
    return "\n".join([opening, *lines, closing])


def constructor_call(
    instance: object, args: tuple[object, ...], kwargs: dict[str, object], is_current: bool = True
) -> str:
    """Represent an object as a call of its constructor with these arguments.

    Args:
        is_current: whether to show an attribute with the name and type of an argument in place of the argument, because
            its value may have changed since
    """
    signature = inspect.signature(type(instance).__init__)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if inspect.Parameter.VAR_POSITIONAL in kinds.values():
        positional, named = args, kwargs
    else:
        positional, named = (), {}
        bound = signature.bind_partial(instance, *args, **kwargs).arguments
        for name, value in islice(bound.items(), 1, None):
            named |= value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
    parts = [short_repr(value) for value in positional]
    for name, value in named.items():
        current = vars(instance).get(name)
        shown = current if is_current and type(current) is type(value) else value
        parts.append(f"{name}={short_repr(shown, name)}")
    return join_wrapped(f"{type(instance).__name__}(", parts, ")")
