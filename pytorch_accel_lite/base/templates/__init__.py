"""Rendering pages and text from the jinja2 templates in this directory."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2 import Environment


class Column(NamedTuple):
    """A column of a table on a page.

    :param is_number: whether it holds numbers, which are right-aligned
    :param best: index of the best value, which is marked
    """

    name: str
    texts: list[str]
    is_number: bool = False
    best: int | None = None


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    return Environment(
        loader=PackageLoader(__name__, ""),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> str:
    """Render a template; values are escaped in HTML.

    :param template: name of a file in this directory
    :param values: values of the template's variables
    """
    return _environment().get_template(template).render(**values)
