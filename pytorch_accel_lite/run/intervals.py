"""How often something happens in a run, in updates, epochs, samples or time."""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction
from typing import Protocol

from pytorch_accel_lite.base.display import short_repr
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.unknown_names import did_you_mean
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.run.progress import Progress
from pytorch_accel_lite.run.request_and_config import TrainerRunConfig
from pytorch_accel_lite.run.run_data import RunData


class CountedRun(Protocol):
    """The part of a run by which intervals measure its progress."""

    progress: Progress
    data: RunData
    ranks: Ranks

    @property
    def required_config(self) -> TrainerRunConfig: ...  # noqa: D102
    @property
    def clock(self) -> float: ...  # noqa: D102
    @property
    def trained_fraction(self) -> Fraction | None: ...  # noqa: D102
    @property
    def max_num_samples(self) -> int | None: ...  # noqa: D102


_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600}
_UNITS = ("updates", "epochs", "samples", *_SECONDS)
# Commas only separate thousands: "0,25" and "0,125" are no numbers here.
_NUMBER = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d[\d_]*)\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_EXAMPLES = "'500 updates', '0.25 epochs', '100_000 samples' or '10 minutes'"


class Interval:
    """How often something happens in a run, such as an evaluation or a save.

    Arguments that take an interval also take its text: ``evaluate_every="500 updates"``. Units are updates, epochs
    (also fractions), samples (of all processes together), seconds, minutes and hours. Within an epoch, an action is due
    after the first update at which another interval has passed, at the same update on all processes. A resumed run
    continues to count from its position, but callbacks start counting times from zero.

    Args:
        every: the interval in words, such as ``"0.25 epochs"``, or a number
        unit: the unit of ``every``, if that is a number

    Attributes:
        text: the interval in words
        unit: the unit, in the plural
        amount: how many units the interval has

    Raises:
        ValueError: if the interval cannot be understood
    """

    def __init__(self, every: str | float | Interval, unit: str | None = None) -> None:
        if isinstance(every, Interval):
            every = every.text
        self.text: str = str(every) if unit is None else f"{every} {unit}"
        # Matching a long text would take minutes.
        match = re.fullmatch(rf"\s*({_NUMBER}|)\s*([a-z]+)\s*", self.text.lower()) if len(self.text) < 100 else None
        unit = "" if match is None else match[2] if match[2].endswith("s") else f"{match[2]}s"
        amount = Fraction(0) if match is None else _fraction(re.sub("[_,]", "", match[1]) or "1")
        if unit not in _UNITS or amount <= 0:
            hint = did_you_mean(unit, _UNITS) if unit not in _UNITS else " It must fit into a float." if match else ""
            raise ValueError(f"{short_repr(self.text)} must be a positive number and one of {', '.join(_UNITS)}.{hint}")
        if unit in ("updates", "samples") and amount.denominator != 1:
            raise ValueError(f"{self.text!r} must be an integer number of {unit}.")
        self.unit = unit
        self.amount: Fraction | float = amount
        self._passed: float = 0  # number of passed intervals; for times, when the last one ended, in seconds

    def __repr__(self) -> str:
        return f"Interval({self.text!r})"

    def __str__(self) -> str:
        return self.text

    @property
    def is_time(self) -> bool:
        """Whether the unit is a unit of time."""
        return self.unit in _SECONDS

    @property
    def is_within_epochs(self) -> bool:
        """Whether the interval may end within an epoch."""
        return self.unit != "epochs" or self.amount % 1 != 0

    def start(self, run: CountedRun, argument: str = "") -> None:
        """Start counting from the position of a run, which may be a resumed one.

        Args:
            argument: name of the argument with the interval, for the warning if the run is too short for it

        Raises:
            ValueError: if the interval is a fraction of an epoch of unknown length
        """
        if self.is_within_epochs and self.unit == "epochs" and run.trained_fraction is None:
            raise ValueError(
                f"{argument or 'the interval'}={self.text!r}: the training data have no length, so a fraction of an "
                "epoch is unknown. Give an interval in updates, samples or minutes."
            )
        self.advance(run)
        config = run.required_config
        lengths = {"updates": config.max_num_train_steps, "epochs": config.num_epochs, "samples": run.max_num_samples}
        length = lengths.get(self.unit)
        if argument and length is not None and self.amount > length and run.ranks.rank == 0:
            unit = self.unit.removesuffix("s") if length == 1 else self.unit
            warn_outside(f"{argument}={self.text!r} is never due: the run has {length} {unit}.")

    def is_due(self, run: CountedRun, *, ends_epoch: bool = False) -> bool:
        """Whether another interval has passed. Times are checked only within epochs.

        Args:
            ends_epoch: whether the current epoch has ended
        """
        if self.is_time:
            return bool(not ends_epoch and run.clock - self._passed >= float(self.amount) * _SECONDS[self.unit])
        return bool(self._count(run, ends_epoch) > self._passed)

    def advance(self, run: CountedRun, *, ends_epoch: bool = False) -> None:
        """Begin the next interval."""
        self._passed = run.clock if self.is_time else self._count(run, ends_epoch)

    def _count(self, run: CountedRun, ends_epoch: bool) -> int:
        progress = run.progress
        if self.unit != "epochs":
            return int((progress.update if self.unit == "updates" else progress.samples) // self.amount)
        if ends_epoch:
            return int(progress.epoch // self.amount)
        within = run.trained_fraction if self.is_within_epochs and progress.is_mid_epoch else 0
        return int((progress.epochs_completed + (within or 0)) // self.amount)

    def state_dict(self, run: CountedRun) -> StateDict:
        """Return the state that a resumed run needs to continue the interval."""
        return {"every": self.text, "passed": run.clock - self._passed if self.is_time else self._passed}

    def load_state_dict(self, state: StateDict, run: CountedRun) -> None:
        """Load a state returned by ``state_dict()``, unless it belongs to another interval."""
        if state.get("every") == self.text:
            self._passed = run.clock - state["passed"] if self.is_time else state["passed"]


def _fraction(text: str) -> Fraction:
    """Return the exact value of a number; 0 if it does not fit into a float.

    A larger number is not computed: an exponent of seven digits would take a minute, and could fill the memory.
    """
    number = float(text)
    return Fraction(text) if 0 < number < math.inf else Fraction(0)


def parse_interval(argument: str, value: object) -> Interval:
    """Return a new interval, or raise an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, (str, Interval)):
        unit = " Add a unit." if isinstance(value, numbers.Real) else ""
        raise TypeError(f"{argument}={value!r} must be an interval, such as {_EXAMPLES}.{unit}")
    try:
        return Interval(value)
    except ValueError as error:
        raise ValueError(f"{argument}={error} Write {_EXAMPLES}.") from None
