"""Types of the optimizers and schedulers that users pass, from torch, other libraries or their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch.optim import Optimizer

from pytorch_accel_lite.base.types import HasStateDict

#: An optimizer, or several optimizers by name or number, as a trainer takes them.
Optimizers = Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer]

#: A function that creates one or several optimizers from a model's trainable parameters.
OptimizerFactory = Callable[..., Optimizers]


class SchedulerLike(HasStateDict, Protocol):
    """A scheduler of torch, of timm, or of the user."""

    @property
    def step(self) -> Callable[..., object]: ...  # noqa: D102


#: A trainer's optimizer: ``None``, a ``DeferredOptimizer``, an optimizer of torch, or Accelerate's wrapper of it.
TrainerOptimizer: TypeAlias = Any

#: A trainer's scheduler: ``None``, a scheduler of torch, timm or the user, or several by optimizer name.
TrainerScheduler: TypeAlias = Any

#: A function that creates a scheduler from an optimizer.
CreateScheduler: TypeAlias = Callable[..., SchedulerLike]

#: A function that creates a scheduler, or several functions by optimizer name.
SchedulerFactory: TypeAlias = CreateScheduler | Mapping[str, CreateScheduler]
