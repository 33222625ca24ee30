"""Rendering pages and text from jinja2 templates in this directory, or from other templates that may use these."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pytorch_accel_lite.base.display import escape_unprintable

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE = Path(__file__).parent


class Column(NamedTuple):
    """A column of a table on a page.

    Args:
        name: heading of the column
        texts: the texts of its cells, from the top
        is_number: whether the column holds numbers, which are right-aligned
        best: index of the best value, which is marked
    """

    name: str
    texts: list[str]
    is_number: bool = False
    best: int | None = None


@cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader([folder, _HERE]),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"line": _as_line, "fence": _fence_of, "visible": partial(escape_unprintable, keeps="\n\t")}
    return environment


def _as_line(text: object) -> str:
    """Escape characters with a meaning in Markdown, for a line of text or a cell of a table."""
    line = " ".join(escape_unprintable(text, keeps="\n").split("\n"))
    return re.sub(r"[|`$]|\](?=\()", r"\\\g<0>", line).replace("<", "&lt;")


def _fence_of(text: str) -> str:
    """Return a fence for a block of code in Markdown that does not occur in the code."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


def render(template: str | Path, **values: object) -> str:
    """Render a template; values are escaped in HTML.

    Args:
        template: name of a file in this directory, or the path of another template, which may use the files in this
            directory
        values: values of the template's variables
    """
    path = _HERE / template  # an absolute path stays as it is
    return _environment(path.parent).get_template(path.name).render(**values)
