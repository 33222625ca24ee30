"""Compilation: the seam for compiled steps, which an extension makes."""

from __future__ import annotations

from typing import Any, Protocol

from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.data.batch_adapter import BatchAdapter
from pytorch_accel_lite.run.run import CompiledForwardLike, TrainerLike


class StepCompiler(Protocol):
    """Makes a compiled form of a trainer's ``calculate_train_batch_loss``.

    It gets the arguments for ``torch.compile``, and the adapter that feeds batches to the trainer's model.
    """

    def __call__(self, trainer: TrainerLike, options: dict[str, Any], adapter: BatchAdapter) -> CompiledForwardLike:
        """Return the compiled form."""


#: The compiler of steps.
STEP_COMPILER: Slot[StepCompiler] = Slot("compiled_step")


def create_compiled_forward(
    trainer: TrainerLike, compile_step: bool | dict[str, Any], adapter: BatchAdapter
) -> CompiledForwardLike | None:
    """Return the compiled form of a trainer's ``calculate_train_batch_loss``, or ``None`` if it is not requested.

    Raises:
        ValueError: if the extension is missing
    """
    if compile_step is False:
        return None
    compiler = STEP_COMPILER.get(f"compile_step={compile_step!r}")
    return compiler(trainer, {} if compile_step is True else dict(compile_step), adapter)
