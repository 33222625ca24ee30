"""Compilation: the seam for compiled steps, which an extension makes, and what compiled code does not work with."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from pytorch_accel_lite.data.batch_adapter import BatchAdapter
from pytorch_accel_lite.extension_names import Slot
from pytorch_accel_lite.run.compiled_forward_interface import CompiledForwardLike
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.steps.features import MANUAL, SHARDED, Conflict, Feature


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


#: A conflict leads to a warning, and batches are computed without compilation.
COMPILED = Feature(
    "compile_step",
    lambda trainer, run: trainer.compiled_forward is not None,
    (
        Conflict(
            MANUAL,
            "it may update several times. Compile the networks that it calls with torch.compile, or the model with "
            "compile_model=True",
        ),
        Conflict(SHARDED, "compile the blocks of the model with compile_model='blocks'"),
    ),
    is_refused=False,
)
_AGAIN = (
    "within a larger graph, compiled code draws other random numbers when it is computed again, and changes buffers "
    "twice. Pass compile_model='blocks', which compiles the blocks one by one"
)
CHECKPOINTED = Feature(
    "activation_checkpointing",
    lambda trainer, run: trainer.activation_checkpointing is not False,
    (
        Conflict(COMPILED, _AGAIN),
        Conflict(Feature("compile_model=True", lambda trainer, run: _is_compiled(trainer.get_model())), _AGAIN),
    ),
)


def _is_compiled(model: nn.Module) -> bool:
    return model._compiled_call_impl is not None or hasattr(model, "_orig_mod")
