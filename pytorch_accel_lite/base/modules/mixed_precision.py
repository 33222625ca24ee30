"""Mixed precision for computations outside the model, such as the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator

from pytorch_accel_lite.base.types import Tree

_NO_CONTEXT = nullcontext()


def mixed_precision(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Run a block under autocast if the accelerator uses mixed precision, like the prepared model's forward pass.

    Casts of weights are not cached from one call to the next: a step may train a critic and then use it.
    """
    return _autocast(accelerator) if accelerator.native_amp else _NO_CONTEXT


def in_mixed_precision(accelerator: Accelerator, compute: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """Return a function that computes under autocast if the accelerator uses mixed precision, else the same function.

    Entering an empty context for each batch would cost time.
    """
    if not accelerator.native_amp:
        return compute

    def compute_under_autocast(data: Tree) -> Tree:
        with _autocast(accelerator):
            return compute(data)

    return compute_under_autocast


@contextmanager
def _autocast(accelerator: Accelerator) -> Iterator[None]:
    with accelerator.autocast():
        torch.set_autocast_cache_enabled(False)
        torch.autocast_decrement_nesting()  # only the outermost autocast clears its cache: make that the model's
        try:
            yield
        finally:
            torch.autocast_increment_nesting()
