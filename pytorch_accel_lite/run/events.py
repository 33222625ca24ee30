"""The events of a run: the callback base class, the handler that calls them, and the errors that end a run."""

from __future__ import annotations

import inspect
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import update_wrapper, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypedDict, TypeVar

from pytorch_accel_lite.base.origins import checked_by, is_from_this_package, is_overridden, warn_outside
from pytorch_accel_lite.base.pictures import Picture
from pytorch_accel_lite.base.reprs import constructor_call
from pytorch_accel_lite.base.text import add_note
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.unknown_names import events_meant, suggest
from pytorch_accel_lite.base.validation import check_booleans
from pytorch_accel_lite.data.batches import BatchOutput
from pytorch_accel_lite.data.sources import BatchData, Index

if TYPE_CHECKING:
    from pytorch_accel_lite.run.settings import RunRequest
    from pytorch_accel_lite.trainer import Trainer


T = TypeVar("T")


class StopTrainingError(Exception):
    """Raise it in a callback to end the run early but in order: the ending events fire, and ``train`` returns.

    With one process, the run stops where it is raised. With several, a single rank may raise it: the request is passed
    to the others, and all ranks stop after the same update. A stopped run is over, also for
    ``train(resume_from="latest")``, unless you give it more epochs or updates, or change the arguments of the callback.
    To continue a run later, raise ``RunPausedError``.
    """

    #: The callback that raised it, as the call that created it.
    raised_by: str | None = None


class RunPausedError(StopTrainingError):
    """Raise it in a callback to pause training: the run ends after the current update, and can be resumed later.

    Use it for time limits of your own, for example.
    """


class RunInterruptedError(RunPausedError):
    """Raised if the signal with number ``signum`` has requested the end of the run."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Stopping because of {signal.Signals(signum).name}.")
        self.signum = signum


class NonFiniteLossError(FloatingPointError):
    """A loss became infinite or NaN. Raised from ``train`` on every rank, after the ending events."""


#: The attribute that holds the arguments with which a callback was created: positional ones, and others by name.
CONSTRUCTOR_ARGUMENTS = "_constructor_arguments"
#: The attribute of a user's callback that holds the names of the attributes set by this package's constructors.
LIBRARY_ATTRIBUTES = "_library_attributes"
#: The attribute that shows that a constructor of this package has been called.
_IS_CONSTRUCTED = "_is_constructed"


def _remember_arguments(cls: type) -> None:
    """Make a constructor remember its arguments for the ``repr`` and, if it is this package's, check bool arguments."""
    constructor: Callable[..., None] = cls.__init__  # type: ignore[misc]
    if constructor is object.__init__ or getattr(constructor, "remembers_arguments", False):
        return
    checks_booleans = is_from_this_package(cls)

    @wraps(constructor)
    def remember(self: object, *args: object, **kwargs: object) -> None:
        __tracebackhide__ = True  # IPython and pytest hide this frame
        vars(self).setdefault(CONSTRUCTOR_ARGUMENTS, (args, kwargs))  # the constructor of the subclass comes first
        before = set(vars(self))
        if checks_booleans:
            vars(self)[_IS_CONSTRUCTED] = True
            check_booleans(constructor, (self, *args), kwargs)
        constructor(self, *args, **kwargs)
        if is_from_this_package(cls) and not is_from_this_package(type(self)):
            vars(self).setdefault(LIBRARY_ATTRIBUTES, set()).update(vars(self).keys() - before)

    remember.remembers_arguments = True  # type: ignore[attr-defined]
    cls.__init__ = remember  # type: ignore[misc]


def arguments_of(callback: TrainerCallback, with_defaults: bool = False) -> dict[str, object]:
    """Return the arguments with which a callback was created, by name.

    Args:
        with_defaults: whether to include the defaults of arguments that were not passed
    """
    args, kwargs = vars(callback).get(CONSTRUCTOR_ARGUMENTS, ((), {}))
    bound = inspect.signature(type(callback)).bind_partial(*args, **kwargs)
    if with_defaults:
        bound.apply_defaults()
    return dict(bound.arguments)


class Failure(TypedDict):
    """A batch that has failed on a rank, as callbacks are told about it.

    Args:
        rank: the rank
        indices: indices of the samples in the dataset, or ``None`` if unknown
        error: type and text of the error
    """

    rank: int
    indices: list[Index] | None
    error: str


class TrainerCallback:
    """Base class of all callbacks. Override the events you need; the others do nothing.

    This is the complete loop, with the event that fires at each point and the keywords that it passes::

        Trainer(...)
            on_init_end

        train(...)
            on_dataloaders_created                           (their lengths are not used yet)
            on_training_run_start
            for each epoch:
                on_train_epoch_start
                for each batch:
                    on_train_step_start
                    batch_output = calculate_train_batch_loss(batch)
                    on_backward_start                        batch, batch_output, step (may change the loss)
                    backward_step(loss)
                    on_backward_end                          batch, batch_output, step
                    on_train_batch_skipped                   failures, error, step (only of a batch that has failed)
                    at the end of a gradient accumulation window:
                        on_optimizer_step_start              (gradients are final: averaged and clipped)
                        optimizer_step, scheduler_step, optimizer_zero_grad
                        on_optimizer_step_end
                    on_train_step_end                        batch, batch_output, step (not of a batch that has failed)
                    after an update:
                        on_update_end                        step
                        for each eval_dataset, if evaluate_every is due:
                            evaluation
                        on_train_step_checkpoint             step (all callbacks have settled)
                on_train_epoch_end
                for each eval_dataset:
                    evaluation
                on_training_run_epoch_end
                on_epoch_checkpoint                          (all callbacks have settled)
            on_stop_training_error                           (only when the run was stopped early)
            on_exception                                     exception (only when an error ends the run)
            on_training_run_end

        evaluation
            on_eval_epoch_start                              is_intermediate
            for each batch:
                on_eval_step_start
                on_eval_step_end                             batch, batch_output (not of a batch that has failed)
                on_eval_batch_skipped                        failures, error, step (only of a batch that has failed)
            on_eval_epoch_end                                is_intermediate

        evaluate(...)
            on_dataloaders_created
            on_evaluation_run_start
            for each dataset:
                evaluation
            on_evaluation_run_end

        predict(...)
            on_predict_run_start
            for each batch:
                on_predict_step_end                          batch, batch_output (not of a batch that has failed)
                on_predict_batch_skipped                     failures, error, step (only of a batch that has failed)
            on_predict_run_end

        whenever processes are lost or join, see takeover
            on_processes_changed                             left, came

    A ``ShowOutputsCallback`` fires ``on_outputs``, with ``outputs`` and ``pictures``, after showing outputs.

    Some kinds of steps fire the events of the backward pass, or also those of the update, as follows::

        auto_microbatch, SkipFailedBatchesCallback, logical_processes
            for each part of the batch, as often as it is tried:
                on_backward_start
                on_backward_end                              (not if it fails)

        LBFGS, recompute_gradients()
            on_backward_start
            on_backward_end
            at the end of a gradient accumulation window:
                on_optimizer_step_start
                for each batch of the window, as often as its gradients are computed:
                    on_backward_start
                    on_backward_end
                on_optimizer_step_end

        train_step(...)
            for each update(loss):
                on_backward_start
                on_backward_end
                at the end of a gradient accumulation window:
                    on_optimizer_step_start
            at the end of a gradient accumulation window:
                on_optimizer_step_end

    If both exist, the trainer's own method (``train_epoch_start`` ...) is called before the event. ``step`` counts
    batches from 0 within an epoch; ``trainer.progress`` holds all counts. An event passes the trainer by position and
    everything else by keyword: name the arguments you need and accept ``**kwargs`` for the others, because more may be
    added. Adding a callback raises an error if one of its methods does not accept the arguments of its event.

    ``configure_run`` is called first, so that a callback can declare what it needs from a run. A callback with
    ``state_dict()`` and ``load_state_dict(state)`` is saved in training states. For your callbacks without these
    methods, training states keep the attributes.

    Attributes:
        affects_training: whether a run trains differently with this callback. ``False`` in callbacks that only observe,
            report or save, or that end a run: resumed runs and comparisons of runs do not mention them.
        saves_attributes: whether training states keep the attributes of your callback
        unsaved_attributes: names of attributes that training states leave out
    """

    affects_training: ClassVar[bool] = True
    saves_attributes: ClassVar[bool] = True
    unsaved_attributes: ClassVar[Collection[str]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _remember_arguments(cls)

    def __repr__(self) -> str:
        """Represent a callback as a call of its constructor, with the arguments it was created with.

        An attribute with the name and type of an argument is shown in place of the argument, because it may have
        changed.
        """
        return constructor_call(self, *vars(self).get(CONSTRUCTOR_ARGUMENTS, ((), {})))

    def _as_created(self) -> str:
        """Represent a callback as the call that created it, even if its attributes have changed since."""
        args, kwargs = vars(self).get(CONSTRUCTOR_ARGUMENTS, ((), {}))
        return constructor_call(self, args, kwargs, is_current=False)

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: object) -> None:
        """Declare what this callback needs from a run. Called once per run, before its dataloaders are created.

        Args:
            request: the settings requested for the run, to be changed as needed; see ``RunRequest``
        """

    def on_init_end(self, trainer: Trainer, **kwargs: object) -> None:
        """The trainer has been constructed."""

    def on_dataloaders_created(self, trainer: Trainer, **kwargs: object) -> None:
        """The dataloaders of a run exist; nothing has been derived from their lengths yet."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: object) -> None:
        """The model is prepared, the dataloaders and the scheduler exist; no batch has been read."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: object) -> None:
        """An epoch of training begins."""

    def on_train_step_start(self, trainer: Trainer, **kwargs: object) -> None:
        """A training batch has been read and placed on the device."""

    def on_backward_start(
        self, trainer: Trainer, *, batch: BatchData, batch_output: BatchOutput, step: int, **kwargs: object
    ) -> None:
        """The loss of a batch is known. Gradients are computed from ``batch_output["loss"]`` as this event leaves it.

        A callback may therefore add to the loss or replace it, on every process. The recorded loss is the one that the
        step returned.
        """

    def on_backward_end(
        self, trainer: Trainer, *, batch: BatchData, batch_output: BatchOutput, step: int, **kwargs: object
    ) -> None:
        """The gradients of a batch have been accumulated."""

    def on_train_batch_skipped(
        self, trainer: Trainer, *, failures: list[Failure], error: BaseException | None, step: int, **kwargs: object
    ) -> None:
        """A batch has failed and is skipped on all ranks.

        Args:
            failures: a dict for each rank that failed, with the ``rank``, the ``indices`` of its samples and the
                ``error`` as text
            error: the exception on the rank that raised it, ``None`` on other ranks
        """

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: object) -> None:
        """An update is about to happen; the gradients are averaged over the window and the ranks, and clipped."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: object) -> None:
        """An update has happened: new weights, scheduler stepped, gradients cleared."""

    def on_train_step_end(
        self, trainer: Trainer, *, batch: BatchData, batch_output: BatchOutput, step: int, **kwargs: object
    ) -> None:
        """A training step is complete, its update included."""

    def on_update_end(self, trainer: Trainer, *, step: int, **kwargs: object) -> None:
        """A step with an update is complete, even if the batch of this step was skipped."""

    def on_train_step_checkpoint(self, trainer: Trainer, *, step: int, **kwargs: object) -> None:
        """All callbacks have handled a step with an update: the place to save."""

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: object) -> None:
        """The training part of an epoch is complete; its losses are in the run history."""

    def on_eval_epoch_start(self, trainer: Trainer, *, is_intermediate: bool, **kwargs: object) -> None:
        """An evaluation begins.

        Args:
            is_intermediate: whether its losses are recorded as ``intermediate_eval_loss``, as those of
                ``run_evaluation()`` are by default; ``False`` for the run's own evaluations, also within an epoch
        """

    def on_eval_step_start(self, trainer: Trainer, **kwargs: object) -> None:
        """An evaluation batch has been read and placed on the device."""

    def on_eval_step_end(
        self, trainer: Trainer, *, batch: BatchData, batch_output: BatchOutput, **kwargs: object
    ) -> None:
        """An evaluation batch is complete."""

    def on_eval_batch_skipped(
        self, trainer: Trainer, *, failures: list[Failure], error: Exception, step: int, **kwargs: object
    ) -> None:
        """An evaluation batch of this rank has failed and is skipped. Do not communicate: other ranks are unaware.

        Args:
            failures: a single dict with the ``rank``, the ``indices`` of the samples and the ``error`` as text
            step: number of the batch in this evaluation, from 0
        """

    def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool, **kwargs: object) -> None:
        """An evaluation is complete; its losses are in the run history."""

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: object) -> None:
        """An epoch is complete, its evaluation included."""

    def on_epoch_checkpoint(self, trainer: Trainer, **kwargs: object) -> None:
        """All callbacks have handled the end of the epoch: the place to save."""

    def on_stop_training_error(self, trainer: Trainer, **kwargs: object) -> None:
        """The run was stopped early; ``trainer.stop_reason`` says why."""

    def on_exception(self, trainer: Trainer, *, exception: BaseException, **kwargs: object) -> None:
        """An error ends the run: release resources.

        Do not communicate with other ranks, which may not have failed.
        """

    def on_training_run_end(self, trainer: Trainer, **kwargs: object) -> None:
        """The run has ended: it finished, was stopped early, or failed with an error raised on all ranks."""

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: object) -> None:
        """``evaluate`` begins."""

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: object) -> None:
        """``evaluate`` has ended."""

    def on_predict_run_start(self, trainer: Trainer, **kwargs: object) -> None:
        """``predict`` begins."""

    def on_predict_step_end(self, trainer: Trainer, *, batch: BatchData, batch_output: Tree, **kwargs: object) -> None:
        """A batch has been predicted; ``batch_output`` holds the outputs of the model."""

    def on_predict_batch_skipped(
        self, trainer: Trainer, *, failures: list[Failure], error: Exception, step: int, **kwargs: object
    ) -> None:
        """A batch of a prediction has failed and is skipped; the arguments are as in an evaluation."""

    def on_predict_run_end(self, trainer: Trainer, **kwargs: object) -> None:
        """``predict`` has ended."""

    def on_processes_changed(self, trainer: Trainer, *, left: list[int], came: list[int], **kwargs: object) -> None:
        """Called when the job continues without lost processes, or with new ones.

        ``trainer.ranks`` already has the new ranks. Do not communicate here: the interrupted work has not been repeated
        yet.

        Args:
            left: the former ranks of the lost processes
            came: the ranks of the new processes
        """

    def on_outputs(
        self, trainer: Trainer, *, outputs: Mapping[str, str], pictures: Mapping[str, Picture], **kwargs: object
    ) -> None:
        """A ``ShowOutputsCallback`` has shown outputs of the model.

        Args:
            outputs: texts, or paths of pictures, by name
            pictures: the pictures by name, as the bytes of a PNG file and as pixels
        """


#: Events that built-in callbacks fire, rather than the loop.
_OF_CALLBACKS = ("on_outputs",)
#: The events of the loop, in its order.
EVENTS: tuple[str, ...] = tuple(
    name for name in vars(TrainerCallback) if name.startswith("on_") and name not in _OF_CALLBACKS
)


def events_between(first: str, last: str) -> tuple[str, ...]:
    """Return the events of a part of the loop, in its order: those after ``first`` and before ``last``."""
    return EVENTS[EVENTS.index(first) + 1 : EVENTS.index(last)]


def keywords_of(event: str) -> tuple[str, ...]:
    """Return the names of an event's arguments besides the trainer, as ``TrainerCallback`` declares them."""
    parameters = inspect.signature(vars(TrainerCallback)[event]).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


Phase = Literal["training", "evaluation", "prediction"]
#: The events of the steps, by phase.
STEP_EVENTS: dict[Phase, tuple[str, ...]] = {
    "training": events_between("on_train_epoch_start", "on_train_epoch_end"),
    "evaluation": events_between("on_eval_epoch_start", "on_eval_epoch_end"),
    "prediction": events_between("on_predict_run_start", "on_predict_run_end"),
}


def _no_op(event: Callable[..., None]) -> Callable[..., None]:
    """Make ``super().on_train_step_end(trainer)`` work without the keywords, which are declared for editors."""

    @wraps(event)
    def nothing(*args: object, **kwargs: object) -> None:
        pass

    return nothing


for _event in (*EVENTS, *_OF_CALLBACKS):
    setattr(TrainerCallback, _event, _no_op(vars(TrainerCallback)[_event]))

Listener = Callable[..., object]

#: Events after the backward pass, where a change of the loss would have no effect. In pytorch-accelerated,
#: ``on_train_step_end`` fires before the backward pass.
_AFTER_BACKWARD = tuple(
    event for event in events_between("on_backward_start", "on_train_epoch_end") if "batch_output" in keywords_of(event)
)


class _AfterBackward:
    """A listener to an event after the backward pass, when it is too late to change the loss."""

    def __init__(self, listener: Listener, event: str) -> None:
        update_wrapper(self, listener)  # for inspect.signature(), and for code that looks for the owner
        self.__wrapped__ = listener
        self.__self__ = getattr(listener, "__self__", listener)
        self._event = event

    def __call__(self, *args: object, **kwargs: object) -> None:
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


class _Listeners(dict[str, tuple[Listener, ...]]):
    """The bound methods that listen to each event, in order, collected when an event is first looked up."""

    def __init__(self, find: Callable[[str], Iterable[Listener]]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, event: str) -> tuple[Listener, ...]:
        result = self[event] = tuple(self._find(event))
        return result


def named_callbacks(callbacks: Iterable[T]) -> dict[str, T]:
    """Return the callbacks under unique names: ``Class``, ``Class#2`` ..."""
    seen: Counter[str] = Counter()
    named = {}
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        named[kind if seen[kind] == 1 else f"{kind}#{seen[kind]}"] = callback
    return named


def callbacks_with(method: str, callbacks: Iterable[object]) -> dict[str, Any]:
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
        timer: called with the callback about to be called, or the phase ``"saving"``; returns a context that times it
    """

    def __init__(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback] | None] = ()) -> None:
        self.callbacks: list[TrainerCallback] = []
        self.listeners: dict[str, tuple[Listener, ...]] = _Listeners(self._find_listeners)
        self.timer: Callable[[object], AbstractContextManager[None]] | None = None
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
        instance = _create(callback) if isinstance(callback, type) else callback
        if not isinstance(instance, TrainerCallback):
            raise TypeError(
                f"callbacks: {callback!r} is not a TrainerCallback. "
                "Pass an instance or a subclass of pytorch_accel_lite.TrainerCallback."
            )
        _check_constructed(instance)
        _check_methods(instance)
        self.callbacks.insert(0 if first else len(self.callbacks), instance)
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

    def configure_run(self, trainer: object, request: RunRequest) -> None:
        """Let every callback declare what it needs from a run, and find the listeners of all events."""
        for callback in self.callbacks:
            configure: Listener = callback.configure_run  # typed with the trainer of the layers above
            configure(trainer, request)
        for event in EVENTS:
            self.listeners[event]

    def warn_of_unknown_events(self) -> None:
        """Warn of methods that are named almost like an event, or like an event of another library."""
        for kind in dict.fromkeys(map(type, self.callbacks)):
            for name in dir(kind):
                is_like_ours = name.startswith("on_") and name not in EVENTS
                method = getattr(kind, name) if is_like_ours or events_meant(name) else None
                if callable(method) and not is_from_this_package(method):
                    hint = suggest(name, [*EVENTS, "state_dict", "load_state_dict"], cutoff=0.88)
                    if hint:
                        warn_outside(
                            f"{kind.__name__}.{name} is not an event of the trainer: it is called only if your program "
                            f"does.{hint}"
                        )

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
        self.call_each(event, raised.append, *args, **kwargs)
        if raised:
            raise next((error for error in raised if not isinstance(error, RunPausedError)), raised[0])

    def call_each(self, event: str, ask: Callable[[Exception], None], *args: object, **kwargs: object) -> None:
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
            except Exception as error:
                self._failed = listener
                _explain(error, listener, event, args, kwargs)
                raise

    def notify_all(self, event: str, *args: object, **kwargs: object) -> list[Exception]:
        """Call an event of the end of a run on every callback, even if some raise errors, and return the errors."""
        return _call_all(event, self.listeners[event], *args, **kwargs)

    def notify_rest(self, event: str, *args: object, **kwargs: object) -> list[Exception]:
        """After an error in this event, call the callbacks after the one that raised it, like ``notify_all()``."""
        listeners, failed, self._failed = self.listeners[event], self._failed, None
        first = listeners.index(failed) + 1 if failed in listeners else len(listeners)
        return _call_all(event, listeners[first:], *args, **kwargs)

    def _find_listeners(self, event: str) -> Iterator[Listener]:
        default = getattr(TrainerCallback, event, None)
        for callback in self.callbacks:
            is_defined = inspect.getattr_static(callback, event, default) is not default
            if is_defined and (id(callback), event) not in self._muted:
                listener = getattr(callback, event)
                checks = event in _AFTER_BACKWARD and not is_from_this_package(listener)
                yield _AfterBackward(listener, event) if checks else listener

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


def set_listening(trainer: HasCallbackHandler, callback: TrainerCallback, listens: bool, *events: str) -> None:
    """Set whether a callback is called at events, except events that a user's subclass of the callback overrides."""
    built_in = [
        vars(kind) for kind in type(callback).__mro__ if is_from_this_package(kind) and kind is not TrainerCallback
    ]
    overridden = [e for e in events if is_overridden(callback, e) and any(e in names for names in built_in)]
    trainer.callback_handler.set_listening(callback, listens, *(e for e in events if e not in overridden))


def _create(callback: type[TrainerCallback]) -> TrainerCallback:
    """Create a callback that was passed as a class."""
    name = callback.__name__
    try:
        inspect.signature(callback).bind()
    except ValueError:  # not written in Python
        pass
    except TypeError as error:
        raise TypeError(f"callbacks: the class {name} needs arguments: {error}. Pass {name}(...).") from None
    return callback()


def _check_constructed(callback: TrainerCallback) -> None:
    """Check that a user's subclass of a built-in callback has called the constructor of that callback."""
    ours = next((c for c in type(callback).__mro__ if is_from_this_package(c) and "__init__" in vars(c)), None)
    if ours is not None and _IS_CONSTRUCTED not in vars(callback):
        raise TypeError(
            f"{type(callback).__name__}.__init__ does not call super().__init__(...), the constructor of "
            f"{ours.__name__}."
        )


def _check_methods(callback: TrainerCallback) -> None:
    """Check that every event method of a callback accepts the arguments it will be called with.

    Raises:
        TypeError: if a method does not; names the class, the method and the right signature
    """
    for name in EVENTS:
        default: object = getattr(TrainerCallback, name)
        if inspect.getattr_static(callback, name) is not default:
            _check_call(getattr(callback, name), name, ("trainer",), dict.fromkeys(keywords_of(name)))
    _check_call(callback.configure_run, "configure_run", ("trainer", "request"), {})


def _check_call(method: Listener, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
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


def _call_all(event: str, listeners: Iterable[Listener], *args: object, **kwargs: object) -> list[Exception]:
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
        _check_call(listener, event, args, kwargs)
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
