"""Placeholders, in the arguments of scheduler factories, for values that are known only when a run starts."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeAlias


class PlaceholderError(ValueError):
    """A placeholder has no value in this run. The message names it and gives advice."""


class Settings(Protocol):
    """The settings of a run. Settings that are not declared here are looked up by name."""

    @property
    def gradient_accumulation_steps(self) -> int | Mapping[int, int]: ...  # noqa: D102
    @property
    def num_update_steps_per_epoch(self) -> int | None: ...  # noqa: D102


class HasSettings(Protocol):
    """A trainer with the settings of its run. Its loaders are looked up by name."""

    @property
    def run_config(self) -> Settings | None: ...  # noqa: D102


#: A placeholder in place of a number, until it is resolved.
Unresolved: TypeAlias = Any
#: A value that can be combined with a placeholder.
Operand: TypeAlias = "float | Placeholder"


def _operators(symbol: str, apply: Callable[..., float]) -> tuple[Callable[[Operand, Operand], Placeholder], ...]:
    """Return the methods of an operator, for a placeholder on the left and on the right of it."""

    def combine(left: Operand, right: Operand) -> Placeholder:
        for operand in (left, right):
            if not isinstance(operand, (numbers.Real, Placeholder)):
                return NotImplemented  # type: ignore[no-any-return]
        return _expression(f"({{}} {symbol} {{}})", apply, left, right)

    def reflected(right: Operand, left: Operand) -> Placeholder:
        return combine(left, right)

    return combine, reflected


@dataclass(frozen=True, eq=False, repr=False)
class Placeholder:
    """An immutable arithmetic expression over values of a run, evaluated by ``resolve()``.

    Supports ``+ - * / // %`` with numbers and other placeholders on either side, ``round``, ``math.floor``,
    ``math.ceil`` and ``-x``. For the smaller or larger of two, see ``TrainerPlaceholderValues.min()``.

    Attributes:
        name: the name of the placeholder, or of the first one in an expression
        value: the expression as Python text over a ``trainer``, such as ``"(trainer.run_config.num_epochs * 2)"``
    """

    _text: str
    _compute: Callable[[HasSettings], float]
    name: str
    value: str

    def resolve(self, trainer: HasSettings) -> float:
        """Return the value of the expression in the trainer's current run.

        Raises:
            PlaceholderError: if a value does not exist in this run, or is divided by zero
        """
        return self._compute(trainer)

    def __repr__(self) -> str:
        return self._text

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"The placeholder {self!r} cannot be pickled; it is resolved when a run starts.")

    def _itself(self, *_: object) -> Placeholder:
        return self

    __copy__ = __deepcopy__ = _itself

    __add__, __radd__ = _operators("+", operator.add)
    __sub__, __rsub__ = _operators("-", operator.sub)
    __mul__, __rmul__ = _operators("*", operator.mul)
    __truediv__, __rtruediv__ = _operators("/", operator.truediv)
    __floordiv__, __rfloordiv__ = _operators("//", operator.floordiv)
    __mod__, __rmod__ = _operators("%", operator.mod)

    def __neg__(self) -> Placeholder:
        return _expression("-{}", operator.neg, self)

    def __round__(self, *ndigits: int) -> Placeholder:
        return _call(round, self, *ndigits)

    def __floor__(self) -> Placeholder:
        return _call(math.floor, self)

    def __ceil__(self) -> Placeholder:
        return _call(math.ceil, self)

    def __trunc__(self) -> Placeholder:
        return _call(math.trunc, self)

    def _refuse_conversion(self, *_: object) -> NoReturn:
        raise TypeError(
            f"The placeholder {self!r} has no value before the run starts, so it cannot be compared or converted, "
            "nor used inside a function such as lr_lambda: pass it as an argument of a functools.partial. Use "
            "round(...) or // for integers, and TrainerPlaceholderValues.min/max for the smaller/larger of two values."
        )

    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = __bool__ = _refuse_conversion


def _expression(template: str, apply: Callable[..., float], *operands: Operand) -> Placeholder:
    """Return an expression that applies a function to operands; the template has a ``{}`` for each of them."""
    text = template.format(*map(repr, operands))
    named = [operand for operand in operands if isinstance(operand, Placeholder)]

    def compute(trainer: HasSettings) -> float:
        try:
            return apply(*(replace_trainer_placeholder_values(trainer, operand) for operand in operands))
        except ArithmeticError as error:
            raise PlaceholderError(f"{text} cannot be resolved in this run: {error}.") from error

    sources = [operand.value if isinstance(operand, Placeholder) else repr(operand) for operand in operands]
    return Placeholder(text, compute, named[0].name if named else "", template.format(*sources))


def _call(function: Callable[..., float], *operands: Operand) -> Placeholder:
    return _expression(f"{function.__name__}({', '.join(['{}'] * len(operands))})", function, *operands)


_NO_LENGTH = (
    "the training data have no length. Pass the number of updates to the scheduler yourself, "
    "or pass max_num_train_steps to train() and use MAX_NUM_TRAIN_STEPS."
)


def _placeholder(
    name: str, source: str, read: Callable[[HasSettings], float | None], missing: str = _NO_LENGTH
) -> Placeholder:
    text = f"TrainerPlaceholderValues.{name}"

    def compute(trainer: HasSettings) -> float:
        if trainer.run_config is None:
            raise PlaceholderError(f"{text} cannot be resolved: no run has been started yet.")
        unknown = PlaceholderError(f"{text} cannot be resolved: {missing}")
        try:
            value = read(trainer)
        except TypeError as error:  # the dataloader has no length
            raise unknown from error
        if value is None:
            raise unknown
        return value

    return Placeholder(text, compute, name, source)


def _setting(name: str, setting: str, missing: str = _NO_LENGTH) -> Placeholder:
    path = f"run_config.{setting}"
    return _placeholder(name, f"trainer.{path}", operator.attrgetter(path), missing)


def _loader(trainer: HasSettings, name: str) -> Sized:
    """Return a loader of a trainer, or of an object that has it only under the name of pytorch-accelerated."""
    loader: Sized = getattr(trainer, name) if hasattr(trainer, name) else getattr(trainer, f"_{name}")
    return loader


def _num_eval_batches(trainer: HasSettings) -> int | None:
    loaders = getattr(trainer, "eval_dataloaders", None)
    return len(_loader(trainer, "eval_dataloader")) if loaders is None else sum(map(len, loaders)) or None


def _updates_per_epoch(name: str) -> Placeholder:
    def read(trainer: HasSettings) -> int | None:
        config = trainer.run_config
        assert config is not None  # see _placeholder
        steps = config.gradient_accumulation_steps
        if isinstance(steps, Mapping) and len(set(steps.values())) > 1:
            raise PlaceholderError(
                f"TrainerPlaceholderValues.{name} cannot be resolved: gradient_accumulation_steps={steps!r} changes "
                "during the run, so that epochs have different numbers of updates. Use MAX_NUM_TRAIN_STEPS, or a "
                "schedule by name, such as 'cosine'."
            )
        return config.num_update_steps_per_epoch

    return _placeholder(name, "trainer.run_config.num_update_steps_per_epoch", read)


class _ListsPlaceholders(type):
    """A class that lists its placeholders as an ``Enum`` lists its members."""

    @property
    def __members__(cls) -> Mapping[str, Placeholder]:
        found = {name: value for name, value in vars(cls).items() if isinstance(value, Placeholder)}
        return MappingProxyType(found)

    def __iter__(cls) -> Iterator[Placeholder]:
        return iter(cls.__members__.values())

    def __len__(cls) -> int:
        return len(cls.__members__)

    def __getitem__(cls, name: str) -> Placeholder:
        return cls.__members__[name]

    def __contains__(cls, value: object) -> bool:
        return any(value is placeholder for placeholder in cls)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Placeholder)


class TrainerPlaceholderValues(metaclass=_ListsPlaceholders):
    """Quantities of a run for use in the arguments of a scheduler factory, before their values are known.

    For example::

        create_scheduler_fn=partial(
            OneCycleLR,
            max_lr=0.01,
            total_steps=TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
        )

    All processes take part in every update, so the number of updates does not grow with the number of processes.

    As with the ``Enum`` of pytorch-accelerated, ``list(...)``, ``TrainerPlaceholderValues["NUM_EPOCHS"]`` and
    ``isinstance(value, TrainerPlaceholderValues)`` work.
    """

    #: The number of epochs of the run.
    NUM_EPOCHS = _setting(
        "NUM_EPOCHS",
        "num_epochs",
        "the training data have no length, so the run is limited by max_num_train_steps only. Use MAX_NUM_TRAIN_STEPS.",
    )
    #: The number of optimizer updates in an epoch (a shorter last accumulation window counts as one). Raises an error
    #: if ``gradient_accumulation_steps`` changes during the run: then use ``MAX_NUM_TRAIN_STEPS``.
    NUM_UPDATE_STEPS_PER_EPOCH = _updates_per_epoch("NUM_UPDATE_STEPS_PER_EPOCH")
    #: The same number, under its name in pytorch-accelerated: every process takes part in every update.
    PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH = _updates_per_epoch("PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH")
    #: The number of optimizer updates in the run.
    MAX_NUM_TRAIN_STEPS = _setting("MAX_NUM_TRAIN_STEPS", "max_num_train_steps")
    #: The number of batches that each process reads in a training epoch.
    TRAIN_DATALOADER_LEN = _placeholder(
        "TRAIN_DATALOADER_LEN",
        "len(trainer.train_dataloader)",
        lambda trainer: len(_loader(trainer, "train_dataloader")),
    )
    #: The number of batches that each process reads in an evaluation.
    EVAL_DATALOADER_LEN = _placeholder(
        "EVAL_DATALOADER_LEN",
        "sum(map(len, trainer.eval_dataloaders))",
        _num_eval_batches,
        "there is no evaluation dataset with a length. Pass eval_dataset to train(), or do not use this placeholder.",
    )

    @classmethod
    def placeholder_set(cls) -> set[str]:
        """Return the names of all placeholders."""
        return set(cls.__members__)

    @staticmethod
    def min(*values: Placeholder | float) -> Placeholder:
        """Return the smallest of several numbers and placeholders."""
        return _call(min, *values)

    @staticmethod
    def max(*values: Placeholder | float) -> Placeholder:
        """Return the largest of several numbers and placeholders."""
        return _call(max, *values)


def replace_trainer_placeholder_values(trainer: HasSettings, instance: Any) -> Any:
    """Replace every placeholder in ``instance`` with its value in the trainer's run.

    Args:
        instance: a ``functools.partial``, whose positional and keyword arguments are searched for placeholders,
            including nested lists, tuples, sets, dicts and partials. Anything else is returned unchanged.

    Raises:
        PlaceholderError: if a value does not exist in this run
    """
    replace = partial(replace_trainer_placeholder_values, trainer)
    kind = type(instance)
    if isinstance(instance, Placeholder):
        return instance.resolve(trainer)
    if isinstance(instance, partial):
        return kind(instance.func, *replace(instance.args), **replace(instance.keywords))
    if kind in (list, tuple, set, frozenset):
        return kind(map(replace, instance))
    if isinstance(instance, tuple) and hasattr(instance, "_fields"):
        return kind(*map(replace, instance))
    if kind is dict:
        return {key: replace(value) for key, value in instance.items()}
    return instance
