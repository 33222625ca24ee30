"""Making a class answer what users of other libraries ask of it. The answers themselves are loaded when needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from pytorch_accel_lite.base.other_libraries import answers

C = TypeVar("C", bound=type)

#: Attributes that a trainer sets and relies on, with the names of their classes; no property, so that reading is fast.
_OWN_ATTRIBUTES = {
    "current_run": ("Run",),
    "open_runs": ("list",),
    "prepared_model": ("PreparedModel", "NoneType"),
    "logical": ("LogicalProcesses", "NoneType"),
    "registered_objects": ("dict",),
}
_METHODS = (
    "__init__",
    "train",
    "evaluate",
    "run_evaluation",
    "predict",
    "predict_iter",
    "find_lr",
    "find_batch_size",
    "diagnose",
    "estimate_memory",
)


def answering(cls: C) -> C:
    """Make the methods of a class answer an unknown argument with ours, in the ``TypeError``."""
    for name in _METHODS:
        if name in vars(cls):
            setattr(cls, name, answering_method(vars(cls)[name], cls))
    return cls


def answering_method(method: Callable[..., Any], cls: type | None = None) -> Callable[..., Any]:
    """Make a single method answer.

    :param cls: the class it belongs to; by default that of the instance
    """
    known = inspect.signature(method).parameters.keys()
    own = _OWN_ATTRIBUTES if hasattr(cls, "train") else {}  # none in callbacks

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython and pytest hide this frame
        if not kwargs.keys() <= known:
            raise TypeError(" ".join(answers(cls or type(self), method, kwargs.keys() - known)))
        for name, kinds in own.items():
            if name in vars(self) and type(vars(self)[name]).__name__ not in kinds:
                raise AttributeError(Refusal(name, "").message(type(self)))
        if method.__name__ != "__init__" and "current_run" not in vars(self):
            needed = "super().__init__(model, loss_func, optimizer)"
            raise RuntimeError(f"{type(self).__name__}.__init__ does not call {needed}.")
        return method(self, *args, **kwargs)

    return call


class KnownElsewhere:
    """A method name that the class does not have, but users of other libraries expect.

    :param answer: advice on what to call instead
    """

    def __init__(self, name: str, answer: str) -> None:
        self._name = name
        self._answer = answer

    def __get__(self, instance: object, owner: type) -> KnownElsewhere:
        if instance is None:
            return self
        raise AttributeError(f"{owner.__name__} has no {self._name}(). {self._answer}")


METHODS = [
    KnownElsewhere("fit", "Call train(train_dataset, num_epochs, eval_dataset)."),
    KnownElsewhere("test", "Call evaluate(dataset)."),
    KnownElsewhere("validate", "Call evaluate(dataset)."),
    KnownElsewhere("add_callback", "Pass callbacks to Trainer(), or to its callback_handler.add_callbacks()."),
]


class Refusal:
    """The setter of a read-only property: raises an error that explains the name and suggests another."""

    def __init__(self, name: str, doc: str) -> None:
        meaning = " ".join(doc.split(".")[0].split())
        self._text = f"{name} is reserved: it is an attribute of the trainer itself"
        self._text += f" ({meaning}). " if meaning else ". "
        self._text += f"Choose another name, for example my_{name.strip('_')}."

    def message(self, cls: type) -> str:
        """Return the refusal of a name that a class has taken."""
        return f"{cls.__name__}.{self._text}"

    def __call__(self, trainer: Any, value: Any) -> None:
        """Refuse an assignment."""
        raise AttributeError(self.message(type(trainer)))


def explain_names(cls: C) -> C:
    """Make every read-only property of a class explain itself when it is assigned to."""
    for name, held in list(vars(cls).items()):
        if isinstance(held, property) and held.fset is None:
            setattr(cls, name, held.setter(Refusal(name, held.__doc__ or "")))
    return cls
