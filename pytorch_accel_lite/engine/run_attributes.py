"""Attributes of a trainer that belong to its run, and names that its subclasses may reuse."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

from pytorch_accel_lite.engine.run import Run, RunData

T = TypeVar("T")


class Shadowable(Generic[T]):
    """An attribute that the trainer never reads itself, so that a subclass may use its name for something else."""

    def __init__(self, read: Callable[[Any], T], doc: str | None = None) -> None:
        self._read = read
        self.__doc__ = read.__doc__ if doc is None else doc

    @overload
    def __get__(self, trainer: None, owner: type) -> Shadowable[T]: ...
    @overload
    def __get__(self, trainer: object, owner: type) -> T: ...
    def __get__(self, trainer: Any, owner: type) -> T | Shadowable[T]:
        return self if trainer is None else self._read(trainer)


def shadowable(name: str) -> Any:
    """Return a :class:`Shadowable` attribute of the current or last run."""
    return Shadowable(attrgetter(f"current_run.{name}"), _doc(name))


def run_property(name: str) -> Any:
    """Return a property for an attribute of the current or last run."""
    return property(attrgetter(f"current_run.{name}"), doc=_doc(name))


def settable(name: str) -> Any:
    """Return a property that changes the run when it is set, as users of pytorch-accelerated do."""

    def write(trainer: Any, value: Any) -> None:
        _check_assignment(trainer, name)
        part, _, attribute = f"current_run.{name}".rpartition(".")
        setattr(attrgetter(part)(trainer), attribute, value)

    return property(attrgetter(f"current_run.{name}"), write, doc=_doc(name))


def _doc(name: str) -> str:
    part, _, attribute = name.rpartition(".")
    owner = RunData if part == "data" else Run
    return getattr(getattr(owner, attribute, None), "__doc__", None) or ""


def _check_assignment(trainer: Any, name: str) -> None:
    """Check that an attribute of the current run can be set now.

    :raises AttributeError: before the trainer is initialised, or for a dataloader while nothing is running, as the next
        run would replace it
    """
    if "current_run" not in vars(trainer):
        raise AttributeError(f"{type(trainer).__name__}: call super().__init__(...) before setting attributes.")
    if name.endswith("_loader") and not trainer.open_runs:
        phase = name.removeprefix("data.").removesuffix("_loader")
        raise AttributeError(
            f"{type(trainer).__name__}.{phase}_dataloader is the loader of the current run, but nothing is running. "
            f"Store your own loader under another name, and return it from create_{phase}_dataloader()."
        )
