"""Checks of a callback: its signatures and its constructor when it is added, the names of its methods in a run."""

from __future__ import annotations

import dis
import inspect
import linecache
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from pytorch_accel_lite.base.environment import is_installed
from pytorch_accel_lite.base.inspection import is_ours
from pytorch_accel_lite.base.unknown_names import suggest


def check_callback(callback: Any, base: type) -> None:
    """Check a callback that is being added, and complete its construction where its class has omitted that."""
    _call_skipped_constructors(callback)
    _check_methods(callback, base)


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


def warn_of_unknown_events(trainer: Any, events: Collection[str]) -> None:
    """Warn of methods that are called like events, but that neither the trainer nor the program calls.

    The first process warns for all.
    """
    found = {(kind, name) for kind in map(type, trainer.callback_handler) for name in _unknown_events(kind, events)}
    if not found or trainer.ranks.rank:
        return
    program = list(_sources(trainer))
    main = vars(sys.modules["__main__"])
    is_whole = "__file__" in main or "In" in main  # rather than read from a pipe
    for kind, name in sorted(found, key=str):
        hint = suggest(name, [*events, "state_dict", "load_state_dict"], cutoff=0.88)
        if (hint or is_whole) and not any(_may_call(source, name) for source in program):
            warnings.warn(
                f"{kind.__name__}.{name} is not an event of the trainer, and no call_event() fires it, so it is never "
                f"called.{hint}",
                stacklevel=5,  # the call of train()
            )


def _unknown_events(callback_class: type, events: Collection[str]) -> Iterator[str]:
    """Yield the methods of the user's that are called like events; what a library defines, it may call itself."""
    for name in dir(callback_class):
        if name.startswith("on_") and name not in events and callable(getattr(callback_class, name)):
            owners = (base.__module__ for base in callback_class.__mro__ if name in vars(base))
            if not any(is_installed(sys.modules.get(owner)) for owner in owners):
                yield name


def _sources(trainer: Any) -> Iterator[str]:
    """Yield the source of each module of the program: those that are not installed, or have a class of the run."""
    parts = [trainer, *trainer.callback_handler]
    used = {base.__module__ for part in parts for base in type(part).__mro__}
    for name, module in list(sys.modules.items()):
        is_ours = name.partition(".")[0] == __package__.partition(".")[0]
        if not is_ours and (name in used or not is_installed(module)):
            yield "".join(linecache.getlines(getattr(module, "__dict__", {}).get("__file__") or ""))
    yield from vars(sys.modules["__main__"]).get("In", [])  # the cells of a notebook


def _may_call(source: str, name: str) -> bool:
    """Whether a source may fire an event: it has the name as a string, calls it, or fires names made when it runs."""
    return bool(re.search(rf"""["']{name}["']|(?<!super\(\))\.{name}\b|call_event\(\s*(?!["'\s])""", source))


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
