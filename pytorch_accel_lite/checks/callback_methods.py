"""Checks of a callback when it is added: its signatures, the spelling of its methods, and its constructor."""

from __future__ import annotations

import dis
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from pytorch_accel_lite.utils import did_you_mean, is_ours


def instance_of(callback: Any) -> Any:
    """Return a callback that was given as an instance or as a class.

    :raises TypeError: if it is a class that cannot be called without arguments
    """
    if not isinstance(callback, type):
        return callback
    with suppress(ValueError):  # not written in Python
        parameters = inspect.signature(callback).parameters.values()
        needed = [
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise TypeError(
                f"callbacks: {callback.__name__} is a class, which needs arguments. Pass an instance: "
                f"{callback.__name__}({', '.join(needed)})."
            )
    return callback()


def check_callback(callback: Any, base: type, events: Iterable[str]) -> None:
    """Check a callback that is being added, and complete its construction where its class has omitted that."""
    _call_skipped_constructors(callback)
    _check_methods(callback, base)
    _warn_about_misspelt_events(type(callback), events)


def _check_methods(callback: Any, base: type) -> None:
    """Check that every event method of a callback accepts the arguments it will be called with.

    :param base: the class whose methods are the events
    :raises TypeError: if one does not; names the class, the method and the right signature
    """
    for name, default in vars(base).items():
        own = vars(callback).get(name) or getattr(type(callback), name, None)
        if name.startswith("on_") and own is not default:
            check_call(getattr(callback, name), name, ("trainer",), dict.fromkeys(_keywords(default)))
    if type(callback).configure_run is not base.configure_run:  # type: ignore[attr-defined]
        check_call(callback.configure_run, "configure_run", ("trainer", "request"), {})


def _keywords(event: Callable[..., None]) -> Iterator[str]:
    """Yield the keyword arguments of an event, as declared by the base class."""
    for parameter in inspect.signature(event).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            yield parameter.name


def check_call(method: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that the method of a callback can be called with these arguments.

    :param name: name of the event
    :raises TypeError: if it cannot
    """
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # not written in Python
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        owner = type(getattr(method, "__self__", method)).__name__
        positional = ("trainer", "request") if name == "configure_run" else ("trainer", "*args")[: len(args)]
        wanted = ", ".join(["self", *positional, *kwargs, "**kwargs"])
        raise TypeError(
            f"{owner}.{name}{signature} does not accept the event's arguments: {error}. Write: def {name}({wanted})"
        ) from None


def _warn_about_misspelt_events(callback_class: type, events: Iterable[str]) -> None:
    """Warn of methods with nearly the name of an event, which would never be called."""
    for name in dir(callback_class):
        if name.startswith("on_") and name not in events:
            hint = did_you_mean(name, events, cutoff=0.88)
            if hint:
                warnings.warn(f"{callback_class.__name__}.{name} is not an event of the trainer.{hint}", stacklevel=5)


def _call_skipped_constructors(callback: Any) -> None:
    """Call the constructors of our classes that the constructor of a subclass has failed to call.

    Their arguments are the attributes of the same names, as far as the subclass has set them.

    :raises TypeError: if the subclass has not set an attribute for a required argument
    """
    own, *inherited = [cls for cls in type(callback).__mro__ if "__init__" in vars(cls)]
    for cls in inherited:
        constructor: Any = inspect.unwrap(vars(cls)["__init__"])
        if not is_ours(cls) or _attributes_set_by(constructor) <= vars(callback).keys():
            continue
        signature = inspect.signature(constructor)
        mine = dict(vars(callback))
        arguments = {name: mine[name] for name in signature.parameters if name in mine}
        try:
            signature.bind(callback, **arguments)
        except TypeError as error:
            raise TypeError(
                f"{own.__name__}.__init__ does not call super().__init__(...), as {cls.__name__} needs: {error}."
            ) from None
        constructor(callback, **arguments)
        vars(callback).update(mine)


def _attributes_set_by(constructor: Callable[..., None]) -> set[str]:
    return {step.argval for step in dis.get_instructions(constructor) if step.opname == "STORE_ATTR"}
