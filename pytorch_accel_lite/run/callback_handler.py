"""The handler that calls the callbacks of a trainer at events."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from pytorch_accel_lite.base.user_code import checked_by, is_from_this_package, is_overridden
from pytorch_accel_lite.base.warnings_and_errors import add_note
from pytorch_accel_lite.run.callback_checks import (
    AFTER_BACKWARD,
    AfterBackward,
    check_call,
    check_constructed,
    check_methods,
    create_callback,
)
from pytorch_accel_lite.run.ending import NonFiniteLossError, RunPausedError, StopTrainingError
from pytorch_accel_lite.run.events import EVENTS, TrainerCallback

if TYPE_CHECKING:
    from pytorch_accel_lite.run.request_and_config import RunRequest

Listener = Callable[..., object]


class _Listeners(dict[str, tuple[Listener, ...]]):
    """The bound methods that listen to each event, in order, collected when an event is first looked up."""

    def __init__(self, find: Callable[[str], Iterable[Listener]]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, event: str) -> tuple[Listener, ...]:
        result = self[event] = tuple(self._find(event))
        return result


def named_callbacks(callbacks: Iterable[TrainerCallback]) -> dict[str, TrainerCallback]:
    """Return callbacks, and then those that they call themselves, under unique names: ``Class``, ``Class#2`` ..."""
    found = [*callbacks]
    for callback in found:  # grows in the loop
        handlers = [value for value in vars(callback).values() if isinstance(value, CallbackHandler)]
        found += [inner for handler in handlers for inner in handler if inner not in found]
    seen: Counter[str] = Counter()
    named = {}
    for callback in found:
        kind = type(callback).__name__
        seen[kind] += 1
        named[kind if seen[kind] == 1 else f"{kind}#{seen[kind]}"] = callback
    return named


def callbacks_with(method: str, callbacks: Iterable[TrainerCallback]) -> dict[str, Any]:
    """Return the callbacks that have a method, named as by ``named_callbacks()``."""
    return {name: callback for name, callback in named_callbacks(callbacks).items() if hasattr(callback, method)}


class CallbackHandler:
    """Calls the callbacks of a trainer, in the order in which they were passed.

    Args:
        callbacks: instances of ``TrainerCallback``, or subclasses of it, which are instantiated without arguments.
            Several callbacks of the same class are allowed, and ``None`` is left out.

    Attributes:
        callbacks: the callbacks, in order
        listeners: the methods that each event calls, by event and in order; an event without listeners costs only a
            look-up
        called_first: functions that events call before the callbacks, by event; clear ``listeners`` after a change
        timer: called with the callback about to be called, or the phase ``"saving"`` or ``"evaluation"``; returns a
            context that times it
    """

    def __init__(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback] | None] = ()) -> None:
        self.callbacks: list[TrainerCallback] = []
        self.listeners: dict[str, tuple[Listener, ...]] = _Listeners(self._find_listeners)
        self.timer: Callable[[object], AbstractContextManager[None]] | None = None
        self.called_first: dict[str, Listener] = {}
        self._muted: set[tuple[int, str]] = set()
        self._failed: Listener | None = None  # the last listener that raised an error
        self.add_callbacks(callbacks)

    def add_callbacks(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback] | None]) -> None:
        """Append several callbacks. ``None`` is left out, as in ``[callback if is_wanted else None]``."""
        if isinstance(callbacks, (str, bytes, TrainerCallback, type)) or not isinstance(callbacks, Iterable):
            raise TypeError(f"callbacks={callbacks!r} must be a list of callbacks.")
        for callback in callbacks:
            if callback is not None:
                self.add_callback(callback)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback], *, first: bool = False) -> None:
        """Append a callback, given as an instance or as a class, or put it before the others."""
        instance = create_callback(callback) if isinstance(callback, type) else callback
        if not isinstance(instance, TrainerCallback):
            raise TypeError(
                f"callbacks: {callback!r} is not a TrainerCallback. "
                "Pass an instance or a subclass of pytorch_accel_lite.TrainerCallback."
            )
        check_constructed(instance)
        check_methods(instance)
        # One that has been removed and freed may have had the same id.
        self._muted = {(owner, event) for owner, event in self._muted if owner != id(instance)}
        self.callbacks.insert(0 if first else len(self.callbacks), instance)
        self.listeners.clear()

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, or all callbacks of exactly a class. In a run, it is not called from the next event on.

        Raises:
            ValueError: if there is no such callback
        """
        left = [other for other in self.callbacks if other is not callback and type(other) is not callback]
        if len(left) == len(self.callbacks):
            raise ValueError(f"callback={callback!r} is not in this handler, which has {self.callback_list}.")
        self.callbacks = left
        self.listeners.clear()

    def clear_callbacks(self) -> None:
        """Remove all callbacks."""
        self.callbacks = []
        self._muted = set()
        self.listeners.clear()

    def set_listening(self, callback: TrainerCallback, listens: bool, *events: str) -> None:
        """Set whether a callback is called at events that it defines. Calls at every step cost time."""
        muted = {(id(callback), event) for event in events}
        self._muted = self._muted - muted if listens else self._muted | muted
        for event in events:
            self.listeners.pop(event, None)

    @property
    def callback_list(self) -> list[str]:
        """The class names of the callbacks, in order."""
        return [type(callback).__name__ for callback in self.callbacks]

    def configure_run(self, trainer: object, request: RunRequest, *, is_outermost: bool = False) -> None:
        """Let every callback declare what it needs from a run, and find the listeners of all events.

        Args:
            is_outermost: whether no other run is open: the list of callbacks may then have been changed
        """
        if is_outermost:
            self.listeners.clear()
            self._failed = None
        for callback in self.callbacks:
            configure: Listener = callback.configure_run  # typed with the trainer of the layers above
            configure(trainer, request)
        for event in EVENTS:
            self.listeners[event]

    def call_event(self, event: str, *args: object, **kwargs: object) -> None:
        """Call an event, which may be your own, on every callback that defines a method of this name.

        Requests to end the run are raised after all have been called: the first stop, or else the first pause.
        """
        listeners = self.listeners[event]
        if len(listeners) == 1 and self.timer is None:
            try:
                listeners[0](*args, **kwargs)
            except Exception as error:
                _explain(error, listeners[0], event, args, kwargs)
                raise
            return
        raised: list[Exception] = []
        self.call_event_passing_stops(event, raised.append, *args, **kwargs)
        if raised:
            raise next((error for error in raised if not isinstance(error, RunPausedError)), raised[0])

    def call_event_passing_stops(
        self, event: str, ask: Callable[[Exception], None], *args: object, **kwargs: object
    ) -> None:
        """Call an event like ``call_event()``, but pass requests to end the run to ``ask`` and continue.

        The next callbacks must run even if one of several processes requests the end, because they may communicate.
        """
        timer = self.timer
        for listener in self.listeners[event]:
            try:
                if timer is None:
                    listener(*args, **kwargs)
                else:
                    with timer(getattr(listener, "__self__", listener)):
                        listener(*args, **kwargs)
            except (StopTrainingError, NonFiniteLossError) as error:
                _note_source(error, listener, event)
                ask(error)
            except BaseException as error:  # Ctrl-C, too
                self._failed = listener
                if isinstance(error, Exception):
                    _explain(error, listener, event, args, kwargs)
                raise

    def timing(self, phase: str) -> AbstractContextManager[None]:
        """Return a context that times a phase."""
        return nullcontext() if self.timer is None else self.timer(phase)

    def call_event_despite_errors(self, event: str, *args: object, **kwargs: object) -> list[Exception]:
        """Call an event on every callback, even if some raise errors, and return the errors."""
        return _call_despite_errors(event, self.listeners[event], *args, **kwargs)

    def call_event_after_error(self, event: str, *args: object, **kwargs: object) -> list[Exception]:
        """Call an event on the callbacks after the one that raised an error in it, and return their errors."""
        listeners, failed, self._failed = self.listeners[event], self._failed, None
        first = listeners.index(failed) + 1 if failed in listeners else len(listeners)
        return _call_despite_errors(event, listeners[first:], *args, **kwargs)

    # Their names in version 0.2.
    call_each, notify_all = call_event_passing_stops, call_event_despite_errors

    def _find_listeners(self, event: str) -> Iterator[Listener]:
        if event in self.called_first:
            yield self.called_first[event]
        default = getattr(TrainerCallback, event, None)
        for callback in self.callbacks:
            is_defined = inspect.getattr_static(callback, event, default) is not default
            if is_defined and (id(callback), event) not in self._muted:
                listener = getattr(callback, event)
                checks = event in AFTER_BACKWARD and not is_from_this_package(listener)
                yield AfterBackward(listener, event) if checks else listener

    def __iter__(self) -> Iterator[TrainerCallback]:
        return iter(self.callbacks)

    def __len__(self) -> int:
        return len(self.callbacks)

    def __repr__(self) -> str:
        """List each event that has listeners, with the classes that listen, in the order they are called."""
        lines = []
        for event in EVENTS:
            names = [type(getattr(call, "__self__", call)).__name__ for call in self.listeners[event]]
            if names:
                lines.append(f"{event}: {', '.join(names)}")
        return "\n".join(lines) or "CallbackHandler: no callback listens to any event"


class HasCallbackHandler(Protocol):
    """The part of a trainer that calls callbacks."""

    callback_handler: CallbackHandler


def set_own_listening(trainer: HasCallbackHandler, callback: TrainerCallback, listens: bool, *events: str) -> None:
    """Set whether a callback is called at events, except events that a user's subclass of the callback overrides.

    Such a subclass may call the callback's own method then, which must do nothing that the user would notice.
    """
    built_in = [
        vars(kind) for kind in type(callback).__mro__ if is_from_this_package(kind) and kind is not TrainerCallback
    ]
    overridden = [e for e in events if is_overridden(callback, e) and any(e in names for names in built_in)]
    trainer.callback_handler.set_listening(callback, listens, *(e for e in events if e not in overridden))


def _call_despite_errors(event: str, listeners: Iterable[Listener], *args: object, **kwargs: object) -> list[Exception]:
    """Call all listeners to an event, even if some raise, and return their errors."""
    errors = []
    for listener in listeners:
        try:
            listener(*args, **kwargs)
        except Exception as error:
            _note_source(error, listener, event)
            errors.append(error)
    return errors


def _explain(
    error: Exception, listener: Listener, event: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Note in an error which callback raised it, and check that the callback accepts the arguments of the event."""
    _note_source(error, listener, event)
    if isinstance(error, TypeError):
        check_call(listener, event, args, kwargs)
    output = kwargs.get("batch_output")
    if isinstance(error, KeyError) and isinstance(output, dict) and error.args and error.args[0] not in output:
        add_note(error, f"batch_output has the keys {', '.join(map(repr, output))}.")


def _note_source(error: Exception, listener: Listener, event: str) -> None:
    """Note in an error which callback raised it. After a stop, a run without that callback may then continue."""
    callback = getattr(listener, "__self__", listener)
    if isinstance(error, StopTrainingError):
        if isinstance(callback, TrainerCallback):
            error.raised_by = callback._as_created()  # noqa: SLF001
    elif not isinstance(error, NonFiniteLossError) and not (is_from_this_package(type(callback)) and checked_by(error)):
        add_note(error, f"In {type(callback).__name__}.{event}.")
