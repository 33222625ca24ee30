"""Placeholders of schedules, written as expressions: ``3 * NUM_UPDATE_STEPS_PER_EPOCH``."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pytorch_accel_lite.placeholders import Placeholder, TrainerPlaceholderValues
from pytorch_accel_lite.utils import suggest

_NAMES: dict[str, Placeholder] = {
    name: value for name, value in vars(TrainerPlaceholderValues).items() if isinstance(value, Placeholder)
}
_PLACEHOLDER_NAME = re.compile(r"\b[A-Z]+(_[A-Z]+)+\b")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: lambda value: value,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": TrainerPlaceholderValues.min,
    "max": TrainerPlaceholderValues.max,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
}


def parse(text: str) -> Any:
    """Return a number, or a placeholder that a run resolves. Nothing is ever passed to ``eval``.

    Raises:
        ValueError: if the text is not such an expression; names the wrong part
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two if the text is nested too deeply
        raise ValueError(f"{text!r} is not an expression") from error
    except (ArithmeticError, TypeError) as error:  # the latter for a wrong number of arguments
        raise ValueError(f"{text!r} has no value: {error}") from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in _NAMES:
            hint = suggest(node.id, _NAMES) or f" There are: {', '.join(_NAMES)}"
            raise ValueError(f"{node.id!r} is not a placeholder.{hint}")
        return _NAMES[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return function(*map(_value, node.args))
    raise ValueError(f"{ast.unparse(node)!r} cannot be part of an expression")


def find_expressions(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the expressions in a nested value: the path of keys and indices to each, and its text."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from find_expressions(inner, (*path, key))
    elif isinstance(value, str) and _PLACEHOLDER_NAME.search(value):
        yield path, value


def with_value_at(value: Any, path: Sequence[str | int], new: object) -> Any:
    """Return a nested value with another one at a path in it."""
    if not path:
        return new
    first, *rest = path
    if isinstance(value, dict):
        return {**value, first: with_value_at(value.get(first), rest, new)}
    return type(value)(with_value_at(item, rest, new) if index == first else item for index, item in enumerate(value))
