"""Runs of models whose weights are sharded over the processes: whether a run is one, and what does it differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from accelerate import Accelerator

from pytorch_accel_lite.extension_names import Slot
from pytorch_accel_lite.run.run import Run, Step, TrainerLike


class Sharding(Protocol):
    """What runs of models with sharded weights do differently. Every process calls each method."""

    def begin_run(self, trainer: TrainerLike, run: Run) -> None:
        """Shard the model, if that is left to the trainer, and decide which processes read which data.

        Called when a run has become the current one, before it reads its data.
        """

    def prepare_training(self, trainer: TrainerLike, run: Run, batch_size: int) -> None:
        """Called in a training run before its model and its optimizer are prepared."""

    def choose_step(self, trainer: TrainerLike, run: Run) -> Callable[[TrainerLike, Run], Step]:
        """Return the kind of step of a training run for which no feature asks for another one."""


#: What shards models, and trains those that are sharded.
SHARDING: Slot[Sharding] = Slot("sharding")


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Return the number of processes that share each batch according to the accelerator's ``parallelism_config``."""
    return getattr(getattr(accelerator, "parallelism_config", None), "tp_size", 1) or 1


def find_sharding(trainer: TrainerLike, run: Run) -> Sharding | None:
    """Return what a run does differently because its model is or will be sharded; ``None`` if it will not be.

    Raises:
        ValueError: if the extension for it is missing
    """
    will_be = "parallelize_model" in run.overridden or tensor_parallel_size(trainer.accelerator) > 1
    return SHARDING.get("A run of a sharded model") if will_be or trainer.is_sharded else None
