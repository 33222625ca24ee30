"""Warmup-stable-decay: a constant learning rate with a quick decay before each checkpoint."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypedDict

import torch

from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    check_bool,
    check_choice,
    check_int,
    check_positive_int,
    check_range,
    warn_outside,
)
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.schedules import RUN_EPOCHS, UPDATES_PER_EPOCH, PlannedLrScheduler, Unresolved


class Period(TypedDict):
    """A period of a schedule, in updates."""

    period_start: int
    period_end: int
    decay_steps: int
    pre_decay_step: int


class PhaseInfo(Period):
    """A period, and the phase of it in which an update is."""

    phase: str


#: Decay shapes: the fraction of the base rate as a function of t, from 0 to 1, and of the final fraction.
DECAYS: dict[str, Callable[[float, float], float]] = {
    "inverse": lambda t, low: 1 / (1 + t * (1 / low - 1)),
    "sqrt": lambda t, low: low + (1 - low) * (1 - math.sqrt(t)),
    "linear": lambda t, low: low + (1 - low) * (1 - t),
    "cosine": lambda t, low: low + (1 - low) * (1 + math.cos(math.pi * t)) / 2,
}


def estimate_checkpoint_steps(total_steps: int, num_checkpoints: int = 3) -> list[int]:
    """Return the updates at which decays end: the last at the end of the schedule, each other at half of the next one.

    Args:
        total_steps: number of updates in the schedule
        num_checkpoints: number of decays

    Raises:
        ValueError: if the schedule is too short for all its decays
    """
    check_positive_int("total_steps", total_steps)
    check_positive_int("num_checkpoints", num_checkpoints)
    if num_checkpoints > 1 and total_steps < 2**num_checkpoints:  # a single period may consist of a decay alone
        raise ValueError(
            f"num_checkpoints={num_checkpoints!r} is too many for total_steps={total_steps!r}: each is at half of the "
            f"next, which takes at least {2**num_checkpoints} updates."
        )
    return [total_steps // 2**halvings for halvings in reversed(range(num_checkpoints))]


def plan_period(start: int, end: int, decay_phase_ratio: float) -> Period:
    """Return a period between two numbers of updates, of which a fraction is decay."""
    # The small number compensates for products like 0.29 * 100, which fall just short of an integer.
    decay_steps = max(1, int(decay_phase_ratio * (end - start) + 1e-9)) if decay_phase_ratio else 0
    return {"period_start": start, "period_end": end, "decay_steps": decay_steps, "pre_decay_step": end - decay_steps}


class WSDLrScheduler(PlannedLrScheduler):
    """Warmup-stable-decay (WSD) schedule: the learning rate is constant, with a quick decay before each checkpoint.

    The schedule consists of periods that each end at a checkpoint: a stable phase at the base rate, then a decay over
    the last ``decay_phase_ratio`` of the period. The first period starts with the warm-up. After every checkpoint but
    the last, training continues from the decayed weights at the base rate (WSD-S). To continue from before a decay
    instead (WSD), or in another run, see ``WSDCheckpointCallback``.

    Sources: Hu et al., `MiniCPM <https://arxiv.org/abs/2404.06395>`_ (WSD); Wen et al., `Understanding
    Warmup-Stable-Decay Learning Rates <https://arxiv.org/abs/2410.05192>`_ (WSD-S, the inverse-proportional decay);
    Hägele et al., `Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations
    <https://arxiv.org/abs/2405.18392>`_ (1 - sqrt).

    Args:
        optimizer: optimizer whose parameter groups have the base rates
        num_epochs: length of the schedule in epochs, with ``num_update_steps_per_epoch``; alternatively pass
            ``total_steps``
        num_update_steps_per_epoch: number of updates per epoch
        total_steps: length of the schedule in updates; takes precedence over ``num_epochs``
        num_warmup_steps: number of updates over which the rate rises linearly; ``None`` for a hundredth of all updates.
            A warm-up that would reach into the first decay is shortened, with a warning. A continuation has no warm-up.
        decay_phase_ratio: fraction of each period that is decay, from 0 (no decay) to 1
        lr_min: rate at the end of a decay, as a fraction of the base rate
        warmup_starting_lr: rate of the first update if there is a warm-up, or the base rate if that is smaller
        use_inverse_sqrt_decay: if ``decay`` is not given: ``True`` for ``"sqrt"``, ``False`` for ``"inverse"``
        num_checkpoints: number of periods; ``estimate_checkpoint_steps()`` determines where they end
        is_continuation_from_checkpoint: whether the weights are already trained: there is no warm-up, and
            ``load_state_dict()`` takes only the base rates from the previous run's state
        decay: shape of the decay, a key of ``DECAYS``
        checkpoint_steps: increasing numbers of updates at which the periods end; the last is the end of the schedule.
            Takes precedence over ``total_steps`` and ``num_checkpoints``.

    Raises:
        TypeError, ValueError: for the first argument that is out of range
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        num_epochs: float | None = None,
        num_update_steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        num_warmup_steps: int | None = 0,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
        *,
        decay: str | None = None,
        checkpoint_steps: Sequence[int] | None = None,
    ) -> None:
        super().__init__(optimizer)
        check_bool("use_inverse_sqrt_decay", use_inverse_sqrt_decay)
        check_bool("is_continuation_from_checkpoint", is_continuation_from_checkpoint)
        by_flag = "sqrt" if use_inverse_sqrt_decay else "inverse"
        self.decay = by_flag if decay is None else check_choice("decay", decay, [*DECAYS])
        self.lr_min = check_range("lr_min", lr_min, most=1)
        if self.decay == "inverse" and not self.lr_min:
            raise ValueError(
                f"lr_min={lr_min!r}: the inverse decay never reaches 0. Choose a positive lr_min, such as 0.1, or "
                "another decay."
            )
        self.decay_phase_ratio = check_range("decay_phase_ratio", decay_phase_ratio, most=1)
        self.warmup_starting_lr = check_range("warmup_starting_lr", warmup_starting_lr)
        self.is_continuation_from_checkpoint = is_continuation_from_checkpoint
        if checkpoint_steps is None:
            total_steps = _count_updates(num_epochs, num_update_steps_per_epoch, total_steps)
            ends = estimate_checkpoint_steps(total_steps, num_checkpoints)
        else:
            ends = _check_checkpoint_steps(checkpoint_steps)
        self._ends = ends
        ratio = self.decay_phase_ratio
        self._periods = [plan_period(start, end, ratio) for start, end in zip([0, *ends], ends, strict=False)]
        self.num_warmup_steps = 0 if is_continuation_from_checkpoint else self._count_warmup(num_warmup_steps)
        self.step_update(0)

    def _count_warmup(self, num_warmup_steps: int | None) -> int:
        limit = self._periods[0]["pre_decay_step"]
        if num_warmup_steps is None:
            return min(self.total_steps // 100, limit)
        check_int("num_warmup_steps", num_warmup_steps, least=0)
        if num_warmup_steps > limit:
            if self._periods[0]["decay_steps"]:
                problem = f"reaches into the first decay, which starts after {limit} updates"
            else:
                problem = f"does not end in the first period, which has {limit} updates"
            warn_outside(
                f"The warm-up of {num_warmup_steps} updates (num_warmup_steps, or num_warmup_epochs) {problem}. It is "
                f"shortened to {limit} updates."
            )
        return min(int(num_warmup_steps), limit)

    @property
    def total_steps(self) -> int:
        """The length of the schedule in updates."""
        return self._ends[-1]

    def _rates_before_scaling(self, num_updates: int) -> list[float]:
        if num_updates < self.num_warmup_steps:
            starts = [min(self.warmup_starting_lr, base) for base in self.base_lr_values]
            done = num_updates / self.num_warmup_steps
            return [start + (base - start) * done for start, base in zip(starts, self.base_lr_values, strict=True)]
        period = self._period_at(num_updates)
        done = num_updates - period["pre_decay_step"]
        decays = done > 0 and period["decay_steps"]
        fraction = DECAYS[self.decay](min(done / period["decay_steps"], 1.0), self.lr_min) if decays else 1.0
        return [base * fraction for base in self.base_lr_values]

    def _period_at(self, num_updates: int) -> Period:
        return self._periods[min(bisect_right(self._ends, num_updates), len(self._ends) - 1)]

    def get_checkpoint_steps(self) -> list[int]:
        """Return the numbers of updates at which the periods end."""
        return list(self._ends)

    def get_decay_info(self) -> list[Period]:
        """Return the start and end of each period, the length of its decay, and when the decay starts.

        Returns:
            dicts with ``period_start``, ``period_end``, ``decay_steps`` and ``pre_decay_step``, all in updates
        """
        return [period.copy() for period in self._periods]

    def get_phase_info(self, num_updates: int) -> PhaseInfo:
        """Return the period and phase of the schedule after a number of updates.

        Returns:
            the period as in ``get_decay_info()``, and the ``phase`` of the next update: ``"warmup"``, ``"stable"``,
            ``"decay"``, or ``"finished"`` after the last period
        """
        period = self._period_at(num_updates)
        if num_updates >= self.total_steps:
            phase = "finished"
        elif num_updates < self.num_warmup_steps:
            phase = "warmup"
        else:
            phase = "stable" if num_updates < period["pre_decay_step"] else "decay"
        return {**period, "phase": phase}

    def get_current_phase_info(self) -> PhaseInfo:
        """Return ``get_phase_info()`` for the current number of updates."""
        return self.get_phase_info(self.num_updates)

    def get_current_step(self) -> int:
        """Return the number of updates counted so far."""
        return self.num_updates

    def state_dict(self) -> StateDict:
        """Return the number of updates, the initial rates, and whether the run is a continuation."""
        return super().state_dict() | {"is_continuation_from_checkpoint": self.is_continuation_from_checkpoint}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state returned by ``state_dict()``, and set the learning rates accordingly.

        If this schedule is a continuation and the state is not from one, the schedule starts from the beginning: see
        ``continue_from()``. A state of pytorch-accelerated, which lacks the number of updates, leaves that number
        unchanged, with a warning.
        """
        if self.is_continuation_from_checkpoint and not state_dict.get("is_continuation_from_checkpoint", False):
            self.continue_from(state_dict)
            return
        if "num_updates" not in state_dict and "total_steps" in state_dict:
            warn_outside(
                "The state for WSDLrScheduler is from pytorch-accelerated, which does not save the schedule's "
                f"position: it continues from update {self.num_updates}. To start a new schedule from this checkpoint "
                "instead, use is_continuation_from_checkpoint=True; to keep the schedule, load_scheduler=False."
            )
            state_dict = {**state_dict, "num_updates": self.num_updates}
        super().load_state_dict(state_dict)

    def continue_from(self, state_dict: StateDict | None) -> None:
        """Start this schedule with the base rates of another run, and set the learning rates accordingly.

        Args:
            state_dict: state of the other run's scheduler; ``None`` keeps the optimizer's base rates
        """
        self._go_to(0, (state_dict or {}).get("base_lr_values", self.base_lr_values))

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: float = RUN_EPOCHS,
        num_update_steps_per_epoch: int = UPDATES_PER_EPOCH,
        num_warmup_epochs: float | None = None,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
        *,
        decay: str | None = None,
    ) -> Callable[[torch.optim.Optimizer], WSDLrScheduler]:
        """Return a scheduler factory for ``Trainer.train(create_scheduler_fn=...)``; by default it spans the run.

        The arguments are those of the constructor; any of them may be or contain placeholders.

        Args:
            num_warmup_epochs: length of the warm-up in epochs, may be fractional; ``None`` for 1 % of the run
        """
        warmup: Unresolved = (
            None if num_warmup_epochs is None else round(num_warmup_epochs * num_update_steps_per_epoch)
        )
        return partial(
            cls,
            num_epochs=total_num_epochs,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            num_warmup_steps=warmup,
            decay_phase_ratio=decay_phase_ratio,
            lr_min=lr_min,
            warmup_starting_lr=warmup_starting_lr,
            use_inverse_sqrt_decay=use_inverse_sqrt_decay,
            num_checkpoints=num_checkpoints,
            is_continuation_from_checkpoint=is_continuation_from_checkpoint,
            decay=decay,
        )


def _count_updates(num_epochs: float | None, per_epoch: int | None, total_steps: int | None) -> int:
    if total_steps is not None:
        return check_positive_int("total_steps", total_steps)
    if num_epochs is None or per_epoch is None:
        raise ValueError(
            f"total_steps=None, num_epochs={num_epochs!r} and num_update_steps_per_epoch={per_epoch!r} do not "
            "determine the length of the schedule. Pass total_steps, or both of the others."
        )
    per_epoch = check_positive_int("num_update_steps_per_epoch", per_epoch)
    updates = round(check_range("num_epochs", num_epochs, above=0) * per_epoch)
    if not updates:
        raise ValueError(
            f"num_epochs={num_epochs!r} with num_update_steps_per_epoch={per_epoch} is less than one update. Pass the "
            "numbers of epochs and of updates in each."
        )
    return updates


def _check_checkpoint_steps(steps: Sequence[int]) -> list[int]:
    if isinstance(steps, (int, str)):
        raise TypeError(f"checkpoint_steps={steps!r} must be a list of numbers of updates.")
    if not steps or any(second - first < 2 for first, second in zip([0, *steps], steps, strict=False)):
        raise ValueError(
            f"checkpoint_steps={steps!r} must increase by at least 2 updates each: one stable, one of decay."
        )
    return list(steps)
