"""What subclasses of the trainer may name and override as they like, and what they are told about the rest.

Nothing here is called in a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

from pytorch_accel_lite.run import Run

T = TypeVar("T")
C = TypeVar("C", bound=type)

#: Methods of pytorch-accelerated that are not called here: the methods that do it now, and what to do.
REPLACED: dict[str, tuple[tuple[str, ...], str]] = {
    "_clip_gradients": (("clip_gradients",), "Override clip_gradients(), which is called once an update."),
    "_prepare_model_optimizer_and_dataloaders": (
        (),
        "Configure Accelerate with Trainer(accelerator=Accelerator(...)), build loaders in create_train_dataloader() "
        "and create_eval_dataloader(), and prepare what else there is in training_run_start().",
    ),
    "_perform_forward_and_backward_passes": (
        ("calculate_train_batch_loss", "backward_step"),
        "Override calculate_train_batch_loss(batch) or backward_step(loss).",
    ),
    "_run_evaluation": (
        ("evaluation_run_start", "evaluation_run_end", "evaluate"),
        "Override evaluation_run_start() and evaluation_run_end(), or evaluate().",
    ),
    "_update_loss_tracker": (
        ("calculate_train_batch_loss", "calculate_eval_batch_loss"),
        "What calculate_train_batch_loss() and calculate_eval_batch_loss() return as 'loss' and 'batch_size' is "
        "tracked: override these.",
    ),
    "_add_epoch_loss_to_run_history": (
        ("train_epoch_end", "eval_epoch_end"),
        "Record metrics of your own with run_history.update_metric() in train_epoch_end() and eval_epoch_end().",
    ),
    "_check_eval_batch_size": ((), "Remove it: every sample is evaluated once, whatever the size of the batches."),
}
#: Methods that the trainer calls on itself, and no subclass is meant to have.
_INTERNAL = ("_check_data", "_check_scheduler")


class Offered(Generic[T]):
    """An attribute that the trainer offers and does not read itself: a subclass may use its name for something else."""

    def __init__(self, read: Callable[[Any], T], doc: str | None = None) -> None:
        self._read = read
        self.__doc__ = read.__doc__ if doc is None else doc

    @overload
    def __get__(self, trainer: None, owner: type) -> Offered[T]: ...
    @overload
    def __get__(self, trainer: object, owner: type) -> T: ...
    def __get__(self, trainer: Any, owner: type) -> T | Offered[T]:
        return self if trainer is None else self._read(trainer)


def offered(name: str) -> Any:
    """Offer an attribute of the current or last run."""
    return Offered(attrgetter(f"current_run.{name}"), _doc(name))


def of_the_run(name: str) -> Any:
    """Return a property for an attribute of the current or last run."""
    return property(attrgetter(f"current_run.{name}"), doc=_doc(name))


def settable(name: str) -> Any:
    """Return one that changes the run when it is set, as the ancestor's users do."""

    def write(trainer: Any, value: Any) -> None:
        _check_assignment(trainer, name)
        setattr(trainer.current_run, name, value)

    return property(attrgetter(f"current_run.{name}"), write, doc=_doc(name))


def _doc(name: str) -> str:
    return getattr(getattr(Run, name, None), "__doc__", None) or ""


def _check_assignment(trainer: Any, name: str) -> None:
    """Check that an attribute of the current run can be set now.

    :raises AttributeError: before the trainer is made; or when it is a loader of batches and nothing runs, whose own
        loaders would take its place
    """
    if "current_run" not in vars(trainer):
        raise AttributeError(f"{type(trainer).__name__}: call super().__init__(...) before you set attributes.")
    if name.endswith("_loader") and not trainer.open_runs:
        phase = name.removesuffix("_loader")
        raise AttributeError(
            f"{type(trainer).__name__}.{phase}_dataloader is the loader of the current run, and there is none. Keep "
            f"a loader of your own under another name, and return it from create_{phase}_dataloader()."
        )


class _Refusal:
    """The setter of a property that cannot be set: says what the name stands for, and what to do."""

    def __init__(self, name: str, doc: str) -> None:
        meaning = " ".join(doc.split(".")[0].split())
        self._text = f"{name} cannot be used for something else: it is the trainer's own"
        self._text += f" ({meaning}). " if meaning else ". "
        self._text += f"Choose another name, my_{name.strip('_')} for example."

    def message(self, cls: type) -> str:
        return f"{cls.__name__}.{self._text}"

    def __call__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(self.message(type(trainer)))


def explain_names(cls: C) -> C:
    """Let every read-only property of a class say, when it is assigned to, what it is and what to do."""
    for name, held in list(vars(cls).items()):
        if isinstance(held, property) and held.fset is None:
            setattr(cls, name, held.setter(_Refusal(name, held.__doc__ or "")))
    return cls


def check_subclass(cls: type, trainer_class: type) -> None:
    """Warn of overrides that nothing calls, when a subclass of the trainer is made.

    :raises TypeError: when it has another meaning for a name on which the trainer relies
    """
    own = [c for c in cls.__mro__ if c is not object and (c is cls or not issubclass(c, trainer_class))]
    defined = {name: held for c in reversed(own) for name, held in vars(c).items()}
    for name in defined.keys() & REPLACED.keys():
        methods, advice = REPLACED[name]
        if not defined.keys() & set(methods):
            text = f"{cls.__name__}.{name} is never called: pytorch_accel_lite has no such method. {advice}"
            warnings.warn(text, stacklevel=3)
    if cls.__module__.startswith(f"{__package__}."):
        return
    for name, held in defined.items():
        refusal = getattr(vars(trainer_class).get(name), "fset", None)
        if name in _INTERNAL:
            refusal = _Refusal(name, "")
        if isinstance(refusal, _Refusal) and not isinstance(held, property):
            raise TypeError(refusal.message(cls))
