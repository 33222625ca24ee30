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
from pytorch_accel_lite.base.user_warnings import warn_outside

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
        replaced: by methods of trainers that are never called here, the methods to override instead
        gone: by further methods that are never called here and have no counterpart, what to do instead
        habits: functions that are called before each run, with the trainer and its callbacks, and warn of code that is
            right elsewhere and wrong here
    """

    arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hooks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    advice: dict[tuple[str, ...], str] = field(default_factory=dict)
    replaced: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    habits: list[Callable[[Iterable[object]], None]] = field(default_factory=list)


#: At first, what pytorch-accelerated calls things.
OTHER_LIBRARIES = OtherLibraries(
    replaced={
        "_clip_gradients": ("clip_gradients",),
        "_prepare_model_optimizer_and_dataloaders": ("_create_accelerator", "training_run_start"),
        "_perform_forward_and_backward_passes": ("calculate_train_batch_loss", "backward_step"),
        "_run_evaluation": ("evaluation_run_start", "evaluation_run_end", "evaluate"),
        "_update_loss_tracker": ("calculate_train_batch_loss", "calculate_eval_batch_loss"),
        "_add_epoch_loss_to_run_history": ("train_epoch_end", "eval_epoch_end"),
    },
    gone={"_check_eval_batch_size": "Remove it: nothing needs it."},
)


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


class AttributeElsewhere:
    """An attribute of other libraries' trainers: reading it raises an ``AttributeError`` that says what to use."""

    def __init__(self, name: str, advice: str) -> None:
        self._name = name
        self._advice = advice

    def __repr__(self) -> str:
        return f"<not there: {self._advice}>"

    def __get__(self, instance: object, owner: type) -> AttributeElsewhere:
        if instance is None:
            return self
        raise AttributeError(f"{owner.__name__} has no {self._name}. {self._advice}")


#: The attributes of other libraries' trainers that are called otherwise here, by name.
ELSEWHERE = {
    "fit": AttributeElsewhere("fit()", "Call train(train_dataset, num_epochs, eval_dataset)."),
    "test": AttributeElsewhere("test()", "Call evaluate(dataset)."),
    "validate": AttributeElsewhere("validate()", "Call evaluate(dataset)."),
    "add_callback": AttributeElsewhere(
        "add_callback()", "Pass callbacks to Trainer(), or to its callback_handler.add_callbacks()."
    ),
    "global_step": AttributeElsewhere("global_step", "Read progress.update, the number of updates."),
    "current_epoch": AttributeElsewhere("current_epoch", "Read progress.epoch, which counts from 1."),
}


def _warn_of_hooks(cls: type, defined: Collection[str], events: Collection[str]) -> None:
    """Warn of a trainer's methods that are named like events, or like hooks of other libraries, and never called."""
    for name in defined:
        meant = [name] if name in events else [event for event in events_meant(name) if event in events]
        methods = [event.removeprefix("on_") for event in meant if hasattr(cls, event.removeprefix("on_"))]
        if not meant or any(method in defined for method in methods):
            continue
        override = f"Override {' or '.join(methods)}, or define" if methods else "Define"
        warn_outside(
            f"{cls.__name__}.{name} is never called by the trainer: only callbacks have events. {override} "
            f"{' or '.join(meant)} in a TrainerCallback."
        )


def check_subclass(cls: type, trainer_class: type, events: Collection[str] = ()) -> None:
    """Warn of overrides that are never called when a subclass of the trainer is defined.

    Args:
        events: names of the events of callbacks

    Raises:
        TypeError: if the class redefines a read-only attribute, on which the trainer relies
    """
    classes = [c for c in cls.__mro__ if c is not object and (c is cls or not issubclass(c, trainer_class))]
    defined = {name: value for c in reversed(classes) for name, value in vars(c).items()}
    never_called = {name: advice for name, advice in OTHER_LIBRARIES.gone.items() if name in defined}
    for name in defined.keys() & OTHER_LIBRARIES.replaced.keys():
        if defined.keys().isdisjoint(OTHER_LIBRARIES.replaced[name]):
            never_called[name] = f"Override {' or '.join(OTHER_LIBRARIES.replaced[name])} instead."
    if not hasattr(cls, "configure_run"):  # the class is not also a callback
        _warn_of_hooks(cls, defined, events)
    for name, advice in never_called.items():
        warn_outside(f"{cls.__name__}.{name} is never called: pytorch_accel_lite has no such method. {advice}")
    for name, value in defined.items() if not is_from_this_package(cls) else ():
        existing = vars(trainer_class).get(name)
        is_read_only = isinstance(existing, property) and existing.fset is None and not isinstance(value, property)
        if is_read_only or name in ("_check_scheduler", "_step_after_epoch"):
            raise TypeError(f"{cls.__name__}.{name} is reserved: the trainer itself has and uses it. Rename yours.")
