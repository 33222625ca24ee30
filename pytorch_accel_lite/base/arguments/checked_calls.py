"""Calls of methods by users: unknown arguments, arguments that should be bools, constructors that were not called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from pytorch_accel_lite.base.arguments.argument_checks import check_booleans
from pytorch_accel_lite.base.display.shown_errors import hide_frames, leave_out_libraries
from pytorch_accel_lite.base.names.unknown_names import OTHER_LIBRARIES, did_you_mean, our_names
from pytorch_accel_lite.base.user_code import WRAPPERS

WRAPPERS.add(__file__)
C = TypeVar("C", bound=type)
T = TypeVar("T")


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
    names = _arguments_of(cls, method)

    @wraps(method)
    def call(self: object, *args: object, **kwargs: object) -> T:
        __tracebackhide__ = True  # IPython and pytest hide this frame
        if not kwargs.keys() <= set(names):
            function = _called(cls, method.__name__)
            answers = {word: _answer(cls, method, word, kwargs[word]) for word in sorted(kwargs.keys() - set(names))}
            raise TypeError(
                " ".join(f"{function} has no argument {word!r}: {answer}" for word, answer in answers.items())
            )
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
