"""Cosine annealing over the entire run, with warm-up and cool-down."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    check_positive_int,
    check_range,
    optional,
    warn_outside,
)
from pytorch_accel_lite.extension_tools.schedules import RUN_EPOCHS, UPDATES_PER_EPOCH, PlannedLrScheduler


class CosineLrScheduler(PlannedLrScheduler):
    """Cosine annealing without restarts: warm-up, half a cosine, cool-down; stepped once per update.

    With W updates of warm-up, C updates of cool-down, and A = total - W - C updates between them, the learning rate
    after n updates is

    * in the warm-up, ``start + (base - start) * n / W``;
    * then ``min + (base - min) * (1 + cos(pi * ((n - W) / A) ** k_decay)) / 2``;
    * in the cool-down and afterwards, ``min``.

    Sources: Loshchilov and Hutter, `SGDR <https://arxiv.org/abs/1608.03983>`_; for ``k_decay`` Zhang and Li,
    `k-decay <https://arxiv.org/abs/2004.05909>`_. The rates are those of timm's ``CosineLRScheduler`` with
    ``warmup_prefix=True``, except that no rate rises above its base rate.

    Args:
        optimizer: optimizer whose parameter groups have the base rates
        total_num_epochs: length of the schedule in epochs, including warm-up and cool-down; may be fractional
        num_update_steps_per_epoch: number of updates per epoch
        k_decay: values above 1 keep the rate high for longer, values below 1 lower it sooner
        lr_min: final rate of every group, or the group's base rate if that is smaller
        min_lr_ratio: final rate as a fraction of each group's base rate, instead of ``lr_min``
        num_warmup_epochs: length of the warm-up in epochs; may be fractional. If warm-up and cool-down leave no updates
            for the annealing, both are shortened proportionally, to half of the schedule together, with a warning.
        warmup_starting_lr: rate of the first update if there is a warm-up, or the base rate if that is smaller
        warmup_starting_lr_ratio: the same as a fraction of each group's base rate, instead of ``warmup_starting_lr``
        num_cooldown_epochs: number of epochs at the final rate; may be fractional

    Attributes:
        num_warmup_steps: number of updates of the warm-up
        num_annealing_steps: number of updates between warm-up and cool-down

    Raises:
        TypeError, ValueError: for the first argument that is out of range
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_epochs: float,
        num_update_steps_per_epoch: int,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float = 0,
    ) -> None:
        super().__init__(optimizer)
        per_epoch = check_positive_int("num_update_steps_per_epoch", num_update_steps_per_epoch)
        total = round(check_range("total_num_epochs", total_num_epochs, above=0) * per_epoch)
        if not total:
            raise ValueError(
                f"total_num_epochs={total_num_epochs!r} with num_update_steps_per_epoch={per_epoch} is less than one "
                "update. Pass the numbers of epochs and of updates in each."
            )
        warmup = round(check_range("num_warmup_epochs", num_warmup_epochs) * per_epoch)
        cooldown = round(check_range("num_cooldown_epochs", num_cooldown_epochs) * per_epoch)
        if warmup + cooldown >= total:
            arguments = f"num_warmup_epochs={num_warmup_epochs!r} and num_cooldown_epochs={num_cooldown_epochs!r}"
            shorter = total / (2 * (warmup + cooldown))
            warmup = int(warmup * shorter)
            cooldown = int(cooldown * shorter)
            warn_outside(
                f"{arguments} leave nothing of total_num_epochs={total_num_epochs!r} for the annealing. They are "
                f"shortened to {warmup} and {cooldown} of {total} updates."
            )
        self.num_warmup_steps = warmup
        self.num_annealing_steps = total - warmup - cooldown
        self.k_decay = check_range("k_decay", k_decay, above=0)
        self.lr_min = check_range("lr_min", lr_min)
        self.warmup_starting_lr = check_range("warmup_starting_lr", warmup_starting_lr)
        check_ratio = partial(check_range, most=1)
        self.min_lr_ratio = optional(check_ratio, "min_lr_ratio", min_lr_ratio)
        self.warmup_starting_lr_ratio = optional(check_ratio, "warmup_starting_lr_ratio", warmup_starting_lr_ratio)
        self.step_update(0)

    def _rates_before_scaling(self, num_updates: int) -> list[float]:
        return [self._rate(base, num_updates) for base in self.base_lr_values]

    def _rate(self, base: float, num_updates: int) -> float:
        if num_updates < self.num_warmup_steps:
            ratio = self.warmup_starting_lr_ratio
            start = min(self.warmup_starting_lr, base) if ratio is None else ratio * base
            return start + (base - start) * num_updates / self.num_warmup_steps
        low = min(self.lr_min, base) if self.min_lr_ratio is None else self.min_lr_ratio * base
        done = min(1.0, (num_updates - self.num_warmup_steps) / self.num_annealing_steps)
        return low + (base - low) * (1 + math.cos(math.pi * done**self.k_decay)) / 2

    @classmethod
    def create_scheduler_fn(
        cls,
        total_num_epochs: float = RUN_EPOCHS,
        num_update_steps_per_epoch: int = UPDATES_PER_EPOCH,
        k_decay: float = 1.0,
        lr_min: float = 1e-6,
        min_lr_ratio: float | None = None,
        num_warmup_epochs: float = 0,
        warmup_starting_lr: float = 1e-6,
        warmup_starting_lr_ratio: float | None = None,
        num_cooldown_epochs: float = 0,
    ) -> Callable[[torch.optim.Optimizer], CosineLrScheduler]:
        """Return a scheduler factory for ``Trainer.train(create_scheduler_fn=...)``; by default it spans the run.

        The arguments are those of the constructor; any of them may be or contain placeholders.
        """
        arguments = {**locals()}
        return partial(arguments.pop("cls"), **arguments)
