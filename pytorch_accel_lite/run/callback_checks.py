"""Checks of callbacks: that they are constructed and can be called when they are added, and change no loss too late."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import update_wrapper

from pytorch_accel_lite.base.arguments import IS_CONSTRUCTED
from pytorch_accel_lite.base.user_code import is_from_this_package
from pytorch_accel_lite.data.sources import BatchOutput
from pytorch_accel_lite.run.events import EVENTS, TrainerCallback, events_between, keywords_of


def create_callback(callback: type[TrainerCallback]) -> TrainerCallback:
    """Create a callback that was passed as a class."""
    name = callback.__name__
    try:
        inspect.signature(callback).bind()
    except ValueError:  # not written in Python
        pass
    except TypeError as error:
        raise TypeError(f"callbacks: the class {name} needs arguments: {error}. Pass {name}(...).") from None
    return callback()


def check_constructed(callback: TrainerCallback) -> None:
    """Check that a user's subclass of a built-in callback has called the constructor of that callback."""
    ours = next((c for c in type(callback).__mro__ if is_from_this_package(c) and "__init__" in vars(c)), None)
    if ours is not None and IS_CONSTRUCTED not in vars(callback):
        raise TypeError(
            f"{type(callback).__name__}.__init__ does not call super().__init__(...), the constructor of "
            f"{ours.__name__}."
        )


def check_methods(callback: TrainerCallback) -> None:
    """Check that every event method of a callback accepts the arguments it will be called with, and then runs.

    Raises:
        TypeError: if a method does not; names the class, the method and the right signature
    """
    for name in EVENTS:
        default: object = getattr(TrainerCallback, name)
        if inspect.getattr_static(callback, name) is not default:
            check_call(getattr(callback, name), name, ("trainer",), dict.fromkeys(keywords_of(name)))
            _check_runs_when_called(callback, name)
    check_call(callback.configure_run, "configure_run", ("trainer", "request"), {})
    _check_runs_when_called(callback, "configure_run")


def _check_runs_when_called(callback: TrainerCallback, name: str) -> None:
    """Check that what a callback has for an event is a method whose body runs when the method is called."""
    method: object = getattr(callback, name)
    where = f"{type(callback).__name__}.{name}"
    if not callable(method):
        raise TypeError(f"{where} is called at that event, so it must be a method, not {method!r}.")
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        word = "yield" if inspect.isgeneratorfunction(method) else "async"
        raise TypeError(
            f"{where} contains {word!r}, so calling it would run none of its lines. Write an ordinary method."
        )


def check_call(
    method: Callable[..., object], name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Check that the method of a callback can be called with these arguments.

    Args:
        name: name of the event

    Raises:
        TypeError: if it cannot
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


#: Events after the backward pass, where a change of the loss would have no effect. In pytorch-accelerated,
#: ``on_train_step_end`` fires before the backward pass.
AFTER_BACKWARD = tuple(
    event for event in events_between("on_backward_start", "on_train_epoch_end") if "batch_output" in keywords_of(event)
)


class AfterBackward:
    """A listener to an event after the backward pass, when it is too late to change the loss."""

    def __init__(self, listener: Callable[..., object], event: str) -> None:
        update_wrapper(self, listener)  # for inspect.signature(), and for code that looks for the owner
        self.__wrapped__ = listener
        self.__self__ = getattr(listener, "__self__", listener)
        self._event = event

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Call the listener.

        Raises:
            RuntimeError: if it changes the loss
        """
        output: BatchOutput = kwargs.get("batch_output") or {}  # type: ignore[assignment]
        loss = output.get("loss")
        version = getattr(loss, "_version", 0)
        self.__wrapped__(*args, **kwargs)
        if loss is not None and _is_another_loss(loss, version, output.get("loss")):
            raise RuntimeError(
                f"{type(self.__self__).__name__}.{self._event} changes batch_output['loss'], but the gradients have "
                "been computed already. Change it in on_backward_start, which is called with the same arguments before "
                "the backward pass."
            )


def _is_another_loss(loss: object, version: int, after: object) -> bool:
    """Whether a loss was changed in place, or replaced; a replacement without a graph is only for display."""
    if after is loss:
        return bool(getattr(loss, "_version", 0) != version)
    needs_gradients = getattr(after, "requires_grad", None)
    return needs_gradients is not None and (needs_gradients or not getattr(loss, "requires_grad", False))
