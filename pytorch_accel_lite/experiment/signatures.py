"""The options of a part: those that the signature of its class or function has."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, Union

import torch

from pytorch_accel_lite.experiment.expressions import Expression
from pytorch_accel_lite.experiment.importing import full_name

# Arguments of a trainer that are parts of their own.
_GIVEN_BY_PARTS = {"model", "loss_func", "optimizer", "callbacks", "run_history", "accelerator"}
# Names in signatures that a module may import for type checkers only, as that of torch's schedulers does.
_TYPING = {name: getattr(module, name) for module in (typing, collections.abc) for name in module.__all__}
_NUMBERS = (int, float)


def add_part(parser: Any, key: str, thing: Any) -> None:
    """Add options for the class of a part, and for the arguments of that class."""
    parser.add_argument(f"--{key}.class_path", type=str, default=full_name(thing), help="a class or a function")
    name = f"{key}.init_args"
    if key in ("optimizer", "scheduler", "accelerator"):
        parser.add_function_arguments(_with_types(thing, key), name, fail_untyped=False)
    elif key == "trainer":
        skip = _GIVEN_BY_PARTS & set(inspect.signature(thing).parameters)
        _add(parser, thing, name, skip)
    elif key == "loss_func" and not inspect.isclass(thing):
        _add(parser, thing, name, {2})  # outputs and targets
    else:
        _add(parser, thing, name, set())


def _add(parser: Any, thing: Any, name: str, skip: set[Any]) -> None:
    if inspect.isclass(thing):
        parser.add_class_arguments(thing, name, skip=skip, fail_untyped=False, instantiate=False)
    else:
        parser.add_function_arguments(thing, name, skip=skip, fail_untyped=False)


def untyped_and_required(thing: Any) -> list[str]:
    """Return the names of arguments without a type and a default, for which the parser puts ``None`` if left out."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # what is not written in Python has no signature
        return []
    empty = inspect.Parameter.empty
    return [parameter.name for parameter in parameters if parameter.annotation is parameter.default is empty]


def takes_anything(thing: Any, known: set[str]) -> bool:
    """Whether a class or function passes on arguments of which nothing is known.

    :param known: names of the arguments that have been found
    """
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # what is not written in Python has no signature
        return True
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return False
    return known <= {parameter.name for parameter in parameters}


def _with_types(thing: Any, key: str) -> Callable[..., Any]:
    """Return a function with the arguments of a class or a function; those of a scheduler may be expressions.

    The first argument of optimizers and schedulers, which is given when a run starts, is left out. So are tensors and
    objects without a meaning of their own, which a file cannot hold.
    """
    others = [p for p in inspect.signature(thing).parameters.values() if type(p.default) is not object]
    others = others if key == "accelerator" else others[1:]
    hints = type_hints(thing.__init__ if inspect.isclass(thing) else thing)

    def surrogate(**_: Any) -> None: ...

    kinds = {}
    parameters = []
    for parameter in others:
        if parameter.name in hints:
            hint = _without_tensors(hints[parameter.name])
            kinds[parameter.name] = _with_expressions(hint) if key == "scheduler" else hint
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            hint = kinds.get(parameter.name, parameter.empty)
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hint))
    vars(surrogate)["__signature__"] = inspect.Signature(parameters)
    surrogate.__annotations__ = kinds
    surrogate.__doc__ = "\n\n".join(filter(None, map(inspect.getdoc, (thing, getattr(thing, "__init__", None)))))
    surrogate.__name__ = thing.__name__
    return surrogate


def type_hints(function: Any) -> dict[str, Any]:
    """Return the types of the arguments of a function as far as they are known: one by one, as any may be unknown."""
    function = inspect.unwrap(function)
    names = {**_TYPING, **getattr(function, "__globals__", {})}
    result: dict[str, Any] = {}

    def holder() -> None: ...

    for name, annotation in getattr(function, "__annotations__", {}).items():
        holder.__annotations__ = {name: annotation}
        with contextlib.suppress(NameError, TypeError, AttributeError):
            result |= typing.get_type_hints(holder, names)
    return result


def _with_expressions(hint: Any) -> Any:
    """Return a type that may be an expression; so may the numbers in a list, such as the milestones of a schedule."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, collections.abc.Iterable, collections.abc.Sequence) and inner[0] in _NUMBERS:
        hint = origin[inner[0] | Expression]
    return hint | Expression


def _without_tensors(hint: Any) -> Any:
    """Return a type without tensors, nested or not."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if not inner or origin is typing.Literal:
        return hint
    kept = tuple(_without_tensors(part) for part in inner if part is not torch.Tensor)
    if origin is Union or isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, kept)
    return hint if kept == inner else origin[kept]
