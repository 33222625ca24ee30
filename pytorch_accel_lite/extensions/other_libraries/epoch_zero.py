"""Warning of comparisons in users' code that are never true here, because epochs count from 1, not from 0."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from types import FunctionType

from pytorch_accel_lite.extension_tools.arguments_and_errors import is_from_this_package, warn_outside

_IN_EPOCHS = re.compile("epoch|step|loss|update|backward")  # in the names of methods that are called in epochs
_looked_at: set[type] = set()


def warn_of_epoch_zero(objects: Iterable[object]) -> None:
    """Warn of methods of users' classes that compare ``progress.epoch`` with 0. Looks at each class once."""
    for kind in {type(one): None for one in objects}:
        if kind in _looked_at:
            continue
        _looked_at.add(kind)
        for owner in [owner for owner in kind.__mro__[:-1] if not is_from_this_package(owner)]:
            for name, method in vars(owner).items():
                if isinstance(method, FunctionType) and any(_compares_with_zero(node) for node in _nodes(method)):
                    warn_outside(
                        f"{kind.__name__}.{name} compares progress.epoch with 0, which it never is in an epoch: epochs "
                        "count from 1, steps and updates from 0. Compare it with 1, or use progress.epochs_completed."
                    )


def _nodes(method: FunctionType) -> Iterator[ast.AST]:
    """Yield the nodes of a method's syntax tree, if its source is available and mentions the epoch."""
    if not {"progress", "epoch"} <= {*method.__code__.co_names} or not _IN_EPOCHS.search(method.__name__):
        return
    try:
        yield from ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method))))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # the file may have been edited since
        return


def _compares_with_zero(node: ast.AST) -> bool:
    """Whether a node is ``progress.epoch == 0``, or ``< 1``, or ``<= 0``."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not _is_epoch(node.left):
        return False
    (operator,), (number,) = node.ops, node.comparators
    value = number.value if isinstance(number, ast.Constant) else None
    never = {ast.Eq: 0, ast.LtE: 0, ast.Lt: 1}
    return value is not None and never.get(type(operator)) == value


def _is_epoch(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != "epoch":
        return False
    owner = node.value
    return getattr(owner, "attr", getattr(owner, "id", "")) == "progress"
