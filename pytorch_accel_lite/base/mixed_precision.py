"""Mixed precision for computations outside the model, such as the loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from accelerate import Accelerator

from pytorch_accel_lite.base.devices import _autocast

_NO_CONTEXT = nullcontext()


def mixed_precision(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Run a block under autocast if the accelerator uses mixed precision, like the prepared model's forward pass.

    Casts of weights are not cached from one call to the next: a step may train a critic and then use it.
    """
    return _autocast(accelerator) if accelerator.native_amp else _NO_CONTEXT
