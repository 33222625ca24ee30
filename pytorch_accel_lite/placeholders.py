"""Values that are known only when a run starts, to be used in scheduler factories."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


class PlaceholderError(ValueError):
    """A placeholder has no value in this run. The message names it and says what to do."""


class Placeholder:
    """An immutable arithmetic expression over values of a run, evaluated by :meth:`resolve`.

    ``+ - * / // %`` work with numbers and other placeholders on either side, as do ``round``, ``math.floor``,
    ``math.ceil`` and ``-x``; for the smaller or larger of two, see :meth:`TrainerPlaceholderValues.min`.
    """

    __slots__ = ("_compute", "_text", "name")
    _text: str
    _compute: Callable[[Trainer], Any]
    name: str

    def __init__(self, text: str, compute: Callable[[Trainer], Any], name: str = "") -> None:
        object.__setattr__(self, "_text", text)
        object.__setattr__(self, "_compute", compute)
        object.__setattr__(self, "name", name)

    def resolve(self, trainer: Trainer) -> Any:
        """Return the value of the expression in the trainer's current run.

        :raises PlaceholderError: when a value does not exist in this run
        """
        return self._compute(trainer)

    def __repr__(self) -> str:
        return self._text

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"The placeholder {self!r} cannot be changed.")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"The placeholder {self!r} cannot be pickled; it is resolved when a run starts.")

    def __copy__(self) -> Placeholder:
        return self

    def __deepcopy__(self, memo: object) -> Placeholder:
        return self

    def __add__(self, other: Any) -> Placeholder:
        return _operation("+", operator.add, self, other)

    def __radd__(self, other: Any) -> Placeholder:
        return _operation("+", operator.add, other, self)

    def __sub__(self, other: Any) -> Placeholder:
        return _operation("-", operator.sub, self, other)

    def __rsub__(self, other: Any) -> Placeholder:
        return _operation("-", operator.sub, other, self)

    def __mul__(self, other: Any) -> Placeholder:
        return _operation("*", operator.mul, self, other)

    def __rmul__(self, other: Any) -> Placeholder:
        return _operation("*", operator.mul, other, self)

    def __truediv__(self, other: Any) -> Placeholder:
        return _operation("/", operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Placeholder:
        return _operation("/", operator.truediv, other, self)

    def __floordiv__(self, other: Any) -> Placeholder:
        return _operation("//", operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Placeholder:
        return _operation("//", operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Placeholder:
        return _operation("%", operator.mod, self, other)

    def __rmod__(self, other: Any) -> Placeholder:
        return _operation("%", operator.mod, other, self)

    def __neg__(self) -> Placeholder:
        return Placeholder(f"-{self!r}", lambda trainer: -self.resolve(trainer))

    def __round__(self, ndigits: int | None = None) -> Placeholder:
        return _function("round", lambda value: round(value, ndigits), self)

    def __floor__(self) -> Placeholder:
        return _function("floor", math.floor, self)

    def __ceil__(self) -> Placeholder:
        return _function("ceil", math.ceil, self)

    def __trunc__(self) -> Placeholder:
        return _function("trunc", math.trunc, self)

    def _not_yet(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"The placeholder {self!r} has no value before the run starts, so it cannot be compared or converted, "
            "nor used within a function (lr_lambda, for example): give it as an argument of a functools.partial. "
            "Use round(...) or // for whole numbers, and TrainerPlaceholderValues.min/max for the smaller/larger."
        )

    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = __bool__ = _not_yet


def _resolve(operand: Any, trainer: Trainer) -> Any:
    return operand.resolve(trainer) if isinstance(operand, Placeholder) else operand


def _operation(symbol: str, apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Placeholder:
    for operand in (left, right):
        if not isinstance(operand, (numbers.Real, Placeholder)):
            return NotImplemented  # type: ignore[no-any-return]
    text = f"({left!r} {symbol} {right!r})"
    return Placeholder(text, lambda trainer: apply(_resolve(left, trainer), _resolve(right, trainer)))


def _function(name: str, apply: Callable[..., Any], *operands: Any) -> Placeholder:
    text = f"{name}({', '.join(map(repr, operands))})"
    return Placeholder(text, lambda trainer: apply(*(_resolve(operand, trainer) for operand in operands)))


def _named(name: str, read: Callable[[Trainer], Any], missing: str) -> Placeholder:
    def compute(trainer: Trainer) -> Any:
        if trainer.run_config is None:
            raise PlaceholderError(f"TrainerPlaceholderValues.{name} cannot be resolved: no run has been started yet.")
        cause = None
        try:
            value = read(trainer)
        except TypeError as error:  # a dataloader without a length
            value = None
            cause = error
        if value is None:
            raise PlaceholderError(f"TrainerPlaceholderValues.{name} cannot be resolved: {missing}") from cause
        return value

    return Placeholder(f"TrainerPlaceholderValues.{name}", compute, name)


def _config(attribute: str) -> Callable[[Trainer], Any]:
    return lambda trainer: getattr(trainer.run_config, attribute)


_NO_LENGTH = (
    "the training data have no length. Pass the number of updates to the scheduler yourself, "
    "or give max_num_train_steps to train() and use MAX_NUM_TRAIN_STEPS."
)


class TrainerPlaceholderValues:
    """Quantities of a run, usable before they are known, in the arguments of a scheduler factory.

    For example::

        create_scheduler_fn=partial(
            OneCycleLR,
            max_lr=0.01,
            total_steps=TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
        )

    Updates are those of the whole job: their number does not grow with the number of processes.
    """

    #: The number of epochs of the run.
    NUM_EPOCHS = _named(
        "NUM_EPOCHS",
        _config("num_epochs"),
        "the training data have no length, so the run is limited by max_num_train_steps only. Use MAX_NUM_TRAIN_STEPS.",
    )
    #: Optimizer updates in an epoch (the last, shorter accumulation window counts as one).
    NUM_UPDATE_STEPS_PER_EPOCH = _named("NUM_UPDATE_STEPS_PER_EPOCH", _config("num_update_steps_per_epoch"), _NO_LENGTH)
    #: The same number, under the name that the ancestor's users know: every process makes every update.
    PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH = _named(
        "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH", _config("num_local_update_steps_per_epoch"), _NO_LENGTH
    )
    #: Optimizer updates in the whole run.
    MAX_NUM_TRAIN_STEPS = _named("MAX_NUM_TRAIN_STEPS", _config("max_num_train_steps"), _NO_LENGTH)
    #: Batches that each process reads in an epoch of training.
    TRAIN_DATALOADER_LEN = _named("TRAIN_DATALOADER_LEN", lambda trainer: len(trainer.train_dataloader), _NO_LENGTH)
    #: Batches that each process reads in an evaluation.
    EVAL_DATALOADER_LEN = _named(
        "EVAL_DATALOADER_LEN",
        lambda trainer: sum(map(len, trainer.eval_dataloaders)) or None,
        "there are no evaluation data with a length. Pass eval_dataset to train(), or do not use it here.",
    )

    @staticmethod
    def min(*values: Placeholder | float) -> Placeholder:
        """The smallest of the given numbers and placeholders."""
        return _function("min", min, *values)

    @staticmethod
    def max(*values: Placeholder | float) -> Placeholder:
        """The largest of the given numbers and placeholders."""
        return _function("max", max, *values)


def replace_trainer_placeholder_values(trainer: Trainer, instance: Any) -> Any:
    """Replace every placeholder in ``instance`` by its value in the trainer's run.

    :param instance: a ``functools.partial``; placeholders are found among its positional and keyword arguments,
        also inside lists, tuples, sets, dicts and inner partials. Anything else is returned as it is.
    :raises PlaceholderError: when a value does not exist in this run
    """
    if isinstance(instance, Placeholder):
        return instance.resolve(trainer)
    if isinstance(instance, partial):
        arguments = [replace_trainer_placeholder_values(trainer, value) for value in instance.args]
        keywords = {k: replace_trainer_placeholder_values(trainer, v) for k, v in instance.keywords.items()}
        return type(instance)(instance.func, *arguments, **keywords)
    if type(instance) in (list, tuple, set, frozenset):
        return type(instance)(replace_trainer_placeholder_values(trainer, value) for value in instance)
    if isinstance(instance, tuple) and hasattr(instance, "_fields"):
        return type(instance)(*(replace_trainer_placeholder_values(trainer, value) for value in instance))
    if isinstance(instance, Mapping) and type(instance) is dict:
        return {k: replace_trainer_placeholder_values(trainer, v) for k, v in instance.items()}
    return instance
