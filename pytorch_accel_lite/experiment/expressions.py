"""Placeholders of schedules, written as expressions: ``3 * NUM_UPDATE_STEPS_PER_EPOCH``."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pytorch_accel_lite.base.placeholders import Placeholder, TrainerPlaceholderValues
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.text import did_you_mean
from pytorch_accel_lite.experiment.yaml_files import ExperimentError

_NAMES: dict[str, Placeholder] = {
    name: value for name, value in vars(TrainerPlaceholderValues).items() if isinstance(value, Placeholder)
}
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


class Expression(str):
    """The text of an expression over the values of a run, as it stands in an experiment file.

    Numbers, the names of :class:`TrainerPlaceholderValues`, ``+ - * / // %``, brackets, ``min``, ``max``, ``round``,
    ``floor`` and ``ceil`` are allowed; nothing is ever passed to ``eval``.

    :raises ValueError: for anything else; names it
    """

    __slots__ = ()

    def __new__(cls, text: Any) -> Expression:  # noqa: D102
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is not an expression")
        parse(text)
        return super().__new__(cls, text)


def parse(text: str) -> Any:
    """Return a number, or a placeholder that a run resolves.

    :raises ValueError: if the text is anything but an expression; names what is wrong in it
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{text!r} is not an expression") from error
    try:
        return _value(tree.body)
    except ZeroDivisionError as error:
        raise ValueError(f"{text!r} divides by zero") from error
    except OverflowError as error:
        raise ValueError(f"{text!r} is too large") from error


def replace_expressions(value: Any, place: str) -> Any:
    """Return a nested value with placeholders in place of expressions.

    :param place: where the value stands, which errors name, also those of placeholders when a run resolves them
    :raises ExperimentError: if a text contains the name of a placeholder but is no expression
    """
    if isinstance(value, (list, tuple)):
        return type(value)(replace_expressions(item, place) for item in value)
    if isinstance(value, dict):
        return {key: replace_expressions(item, place) for key, item in value.items()}
    if not isinstance(value, Expression) and not (isinstance(value, str) and any(name in value for name in _NAMES)):
        return value
    with _naming(place):
        found = parse(value)
    return _located(found, place) if isinstance(found, Placeholder) else found


def _located(placeholder: Placeholder, place: str) -> Placeholder:
    def compute(trainer: TrainerLike) -> Any:
        with _naming(place):
            return placeholder.resolve(trainer)

    return Placeholder(repr(placeholder), compute)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ExperimentError(f"{place}: {str(error).rstrip('.')}.") from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in _NAMES:
            hint = did_you_mean(node.id, _NAMES) or f" There are: {', '.join(_NAMES)}"
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
