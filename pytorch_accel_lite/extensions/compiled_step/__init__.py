"""Training steps compiled with ``torch.compile``, for ``Trainer(compile_step=True)``."""

from pytorch_accel_lite.extending import STEP_COMPILER
from pytorch_accel_lite.extensions.compiled_step.compiled_forward import CompiledForward

__all__ = ["CompiledForward"]

STEP_COMPILER.fill(CompiledForward)
