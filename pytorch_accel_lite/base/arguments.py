"""Arguments of constructors and methods: checks whose errors name the argument, and the calls that are checked."""

from __future__ import annotations

import inspect
import math
import numbers
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, TypeVar

import numpy as np

from pytorch_accel_lite.base.unknown_names import OTHER_LIBRARIES, did_you_mean, our_names
from pytorch_accel_lite.base.user_code import WRAPPERS, is_from_this_package
from pytorch_accel_lite.base.warnings_and_errors import hide_frames, leave_out_libraries

T = TypeVar("T")


def check_number(name: str, value: object, kind: type = numbers.Real, called: str = "a number") -> Any:
    """Return ``value`` if it is a number of this kind, otherwise raise an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be {called}, not {type(value).__name__}.")
    return value


def check_positive_int(name: str, value: object) -> int:
    """Return ``value`` if it is an integer of at least one, otherwise raise an error that names the argument."""
    return check_int(name, value, least=1)


def check_int(name: str, value: object, least: int) -> int:
    """Return ``value`` if it is an integer that is large enough, otherwise raise an error that names the argument."""
    number = int(check_number(name, value, numbers.Integral, "an integer"))
    if number < least:
        raise ValueError(f"{name}={value!r} must be at least {least}.")
    return number


def check_positive_number(name: str, value: object) -> float:
    """Return ``value`` as a float if it is positive, including infinity, otherwise raise an error."""
    number = float(check_number(name, value))
    if not number > 0:
        raise ValueError(f"{name}={value!r} must be greater than 0. Omit it for no limit.")
    return number


def check_range(name: str, value: object, most: float = math.inf, above: float | None = None) -> float:
    """Return ``value`` as a float if it is finite and within limits, otherwise raise an error naming the argument.

    Args:
        above: a limit that the number must exceed; by default, the number must be at least 0
    """
    number = float(check_number(name, value))
    large_enough = number >= 0 if above is None else number > above
    if not (large_enough and number <= most and math.isfinite(number)):
        limits = "at least 0" if above is None else f"greater than {above}"
        limits += f" and at most {most}" if math.isfinite(most) else ""
        raise ValueError(f"{name}={value!r} must be {limits}.")
    return number


def optional(check: Callable[[str, object], T], name: str, value: object) -> T | None:
    """Return ``None``, or a value that passes a check."""
    return None if value is None else check(name, value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of the choices, otherwise raise an error that names the argument and lists them."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, choices))}.")
    return str(value)


def check_names(name: str, value: object) -> list[str]:
    """Return ``value`` as a list if it holds names, otherwise raise an error that names the argument."""
    if isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a list of names. Write: {name}=[{value!r}].")
    names = list(value) if isinstance(value, Iterable) and getattr(value, "ndim", None) != 0 else None
    if names is None or not all(isinstance(each, str) for each in names):
        raise TypeError(f"{name}={value!r} must be a list of names.")
    return names


def check_dict(name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a dict, empty for ``None``, or raise an error that names the argument."""
    try:
        return dict(value or {})
    except (TypeError, ValueError):
        hint = f" Pass vars({name})." if isinstance(value, Namespace) else ""
        raise TypeError(f"{name}={value!r} must be a dict, not {type(value).__name__}.{hint}") from None


def check_bool(name: str, value: T, may_be_none: bool = False) -> T:
    """Return ``value`` if it is a bool, of Python or numpy, or 0 or 1; otherwise, as for a string, raise an error."""
    is_valid = isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1))
    if not (is_valid or (may_be_none and value is None)):
        expected = "True, False, or None" if may_be_none else "True or False"
        raise TypeError(f"{name}={value!r} must be {expected}, not {type(value).__name__}.")
    return value


def check_booleans(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Check the arguments of a call that the function declares as ``bool`` or ``bool | None``."""
    signature, booleans = _booleans_of(function)
    if not booleans:
        return
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call itself will say what is wrong
        return
    for name in booleans.keys() & arguments.keys():
        check_bool(name, arguments[name], booleans[name])


@cache
def _booleans_of(function: Callable[..., object]) -> tuple[inspect.Signature, dict[str, bool]]:
    """Return the signature of a function and, for each bool argument, whether it may be ``None``."""
    signature = inspect.signature(function)
    kinds = {"bool": False, "bool | None": True}  # annotations are strings here
    return signature, {name: kinds[p.annotation] for name, p in signature.parameters.items() if p.annotation in kinds}


def refuse_class(name: str, value: object) -> None:
    """Raise a ``TypeError`` if an argument is a class in place of an instance."""
    if isinstance(value, type):
        raise TypeError(f"{name}={value!r} must be an instance, not a class: {value.__name__}(...).")


WRAPPERS.add(__file__)
C = TypeVar("C", bound=type)


def checked_calls(*methods: str) -> Callable[[C], C]:
    """Return a decorator for a class, by which calls of its methods are checked before they are made.

    An unknown argument is an error that suggests a name. So is a value other than a bool where one is expected. The
    tracebacks of errors and interrupts within a call leave out frames that say nothing to a user.

    Args:
        methods: the names of the methods; one that the class does not have is left out
    """

    def decorate(cls: C) -> C:
        for name in vars(cls).keys() & {*methods}:
            setattr(cls, name, _checked(vars(cls)[name], cls))
        return cls

    return decorate


def _checked(method: Callable[..., T], cls: type) -> Callable[..., T]:
    names = {*_arguments_of(cls, method)}
    function = _called(cls, method.__name__)

    @wraps(method)
    def call(self: object, *args: object, **kwargs: object) -> T:
        __tracebackhide__ = True  # IPython and pytest hide this frame
        if unknown := sorted(kwargs.keys() - names):
            answers = {word: _answer(cls, method, word, kwargs[word]) for word in unknown}
            raise TypeError(" ".join(f"{function} has no argument {word!r}: {answers[word]}" for word in unknown))
        if method.__name__ != "__init__" and "current_run" not in vars(self):
            raise RuntimeError(
                f"{type(self).__name__}.__init__ does not call super().__init__(model, loss_func, optimizer)."
            )
        check_booleans(method, (self, *args), kwargs)
        try:
            return method(self, *args, **kwargs)
        except KeyboardInterrupt as interrupt:
            leave_out_libraries(interrupt)
            raise
        except Exception as error:
            hide_frames(error)
            raise

    return call


def _arguments_of(cls: type, method: Callable[..., object]) -> list[str]:
    """Return the arguments of a method, including those of ``train`` if the method takes these as ``**arguments``."""
    names = list(inspect.signature(method).parameters)[1:]
    if "arguments" not in names:
        return names
    names.remove("arguments")
    return list(dict.fromkeys([*names, *_arguments_of(cls, vars(cls)["train"])]))


def _answer(cls: type, method: Callable[..., object], word: str, value: object) -> str:
    """Return what to write instead of an unknown argument."""
    candidates = [word, *our_names(word)]
    arguments = _arguments_of(cls, method)
    renamed = next((ours for ours in candidates if ours in arguments), None)
    if renamed:
        return f"it is called {renamed}."
    for other in ("__init__", "train") if hasattr(cls, "train") else ():
        parameters = inspect.signature(getattr(cls, other)).parameters
        moved = next((ours for ours in candidates if ours in parameters), None)
        if moved:
            return f"pass {moved} to {_called(cls, other)}."
    advice = next((advice for words, advice in OTHER_LIBRARIES.advice.items() if word in words), "")
    advice = advice.replace("<value>", repr(value if isinstance(value, str) else "wandb"))
    return advice or did_you_mean(word, arguments).strip() or f"it has {', '.join(arguments)}."


def _called(cls: type, method: str) -> str:
    return f"{cls.__name__}()" if method == "__init__" else f"{method}()"


#: The attribute that holds the arguments with which an object was created: positional ones, and others by name.
CONSTRUCTOR_ARGUMENTS = "_constructor_arguments"
#: The attribute that holds the names of the attributes set by this package's constructors.
LIBRARY_ATTRIBUTES = "_library_attributes"
#: The attribute that shows that a constructor of this package has been called.
IS_CONSTRUCTED = "_is_constructed"


def remember_arguments(cls: type) -> None:
    """Make a constructor remember its arguments for the ``repr`` and, if it is this package's, check bool arguments."""
    constructor: Callable[..., None] = cls.__init__  # type: ignore[misc]
    if constructor is object.__init__ or getattr(constructor, "remembers_arguments", False):
        return
    is_ours = is_from_this_package(cls)

    @wraps(constructor)
    def remember(self: object, *args: object, **kwargs: object) -> None:
        __tracebackhide__ = True  # IPython and pytest hide this frame
        vars(self).setdefault(CONSTRUCTOR_ARGUMENTS, (args, kwargs))  # the constructor of the subclass comes first
        before = set(vars(self))
        if is_ours:
            vars(self)[IS_CONSTRUCTED] = True
            check_booleans(constructor, (self, *args), kwargs)
        constructor(self, *args, **kwargs)
        if is_ours and not is_from_this_package(type(self)):
            vars(self).setdefault(LIBRARY_ATTRIBUTES, set()).update(vars(self).keys() - before)

    remember.remembers_arguments = True  # type: ignore[attr-defined]
    cls.__init__ = remember  # type: ignore[misc]


def constructor_arguments(instance: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments with which an object was created: positional ones, and others by name."""
    arguments: tuple[tuple[object, ...], dict[str, object]] = vars(instance).get(CONSTRUCTOR_ARGUMENTS, ((), {}))
    return arguments


def library_attributes(instance: object) -> set[str]:
    """Return the names of the attributes that this package has set in an object when it was created."""
    return {CONSTRUCTOR_ARGUMENTS, LIBRARY_ATTRIBUTES, *vars(instance).get(LIBRARY_ATTRIBUTES, ())}


def arguments_of(instance: object, with_defaults: bool = False) -> dict[str, object]:
    """Return the arguments with which an object was created, by name.

    Args:
        with_defaults: whether to include the defaults of arguments that were not passed
    """
    args, kwargs = constructor_arguments(instance)
    bound = inspect.signature(type(instance)).bind_partial(*args, **kwargs)
    if with_defaults:
        bound.apply_defaults()
    return dict(bound.arguments)
