"""``Did you mean``: suggestions for unknown names, some of which are those of other libraries."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import TypeVar

from pytorch_accel_lite.base.argument_checks import check_booleans
from pytorch_accel_lite.base.user_code import WRAPPERS, hide_frames, is_from_this_package, leave_out_libraries

WRAPPERS.add(__file__)
C = TypeVar("C", bound=type)
T = TypeVar("T")

_PUBLIC_METHODS = (
    *("__init__", "train", "evaluate", "run_evaluation", "predict", "predict_iter"),
    *("find_lr", "find_batch_size", "check", "diagnose", "estimate_memory"),
    *("save_checkpoint", "load_checkpoint", "save_model", "save_training_state"),
)


@dataclass(eq=False, repr=False)
class OtherLibraries:
    """What other libraries do otherwise, for errors and warnings that say what to write here. An extension fills it in.

    Attributes:
        arguments: by the name of an argument here, of any method, the names elsewhere
        hooks: by the name of an event here, the names of hooks at the same point elsewhere
        advice: by words that have no corresponding argument, what to do instead
        attributes: by attributes of trainers elsewhere, ``"name"`` or ``"method()"``, what to use instead
        methods: functions that are called with each new subclass of the trainer and the names that it defines, and warn
            of methods that are called elsewhere and never here
        habits: functions that are called before each run with the trainer and callbacks whose classes are users', if
            any, and warn of code that is right elsewhere and wrong here
    """

    arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hooks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    advice: dict[tuple[str, ...], str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    methods: list[Callable[[type, Collection[str]], None]] = field(default_factory=list)
    habits: list[Callable[[Iterable[object]], None]] = field(default_factory=list)


#: Empty without the extension.
OTHER_LIBRARIES = OtherLibraries()


def did_you_mean(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of some names, or an empty string if none is close."""
    matches = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def suggest(word: str, existing: Collection[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the name that other libraries call ``word``, or a similar one, or nothing.

    Args:
        cutoff: how similar a word must be, from 0 to 1
    """
    ours = [ours for ours in _our_names(word) if ours in existing]
    return f" Did you mean {' or '.join(map(repr, ours))}?" if ours else did_you_mean(word, existing, cutoff)


def _our_names(word: str) -> list[str]:
    return [ours for ours, theirs in OTHER_LIBRARIES.arguments.items() if word in theirs] + events_meant(word)


def events_meant(hook: str) -> list[str]:
    """Return the events of this package at the points where other libraries call a hook of this name."""
    return [event for event, hooks in OTHER_LIBRARIES.hooks.items() if hook in hooks]


def suggest_arguments(cls: C) -> C:
    """Make the public methods of a class suggest names for unknown arguments, and check bool arguments."""
    for name in _PUBLIC_METHODS:
        if name in vars(cls):
            setattr(cls, name, _suggesting(vars(cls)[name], cls))
    return cls


def _suggesting(method: Callable[..., T], cls: type) -> Callable[..., T]:
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
    candidates = [word, *_our_names(word)]
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


def check_subclass(cls: type, trainer_class: type) -> None:
    """Check what a subclass of the trainer defines, when it is made.

    Raises:
        TypeError: if the class redefines a read-only attribute, on which the trainer relies
    """
    classes = [c for c in cls.__mro__ if c is not object and (c is cls or not issubclass(c, trainer_class))]
    defined = {name: value for c in reversed(classes) for name, value in vars(c).items()}
    for warn_of_methods in OTHER_LIBRARIES.methods:
        warn_of_methods(cls, defined)
    for name, value in defined.items() if not is_from_this_package(cls) else ():
        existing = vars(trainer_class).get(name)
        is_read_only = isinstance(existing, property) and existing.fset is None and not isinstance(value, property)
        if is_read_only or name in ("_check_scheduler", "_step_after_epoch"):
            raise TypeError(f"{cls.__name__}.{name} is reserved: the trainer itself has and uses it. Rename yours.")
