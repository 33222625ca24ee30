"""Mixed precision for computations outside the model, such as the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator

_NO_CONTEXT = nullcontext()


def mixed_precision(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Run a block under autocast if the accelerator uses mixed precision, like the prepared model's forward pass.

    Casts of weights are not cached from one call to the next: a step may train a critic and then use it.
    """
    return _autocast(accelerator) if accelerator.native_amp else _NO_CONTEXT


@contextmanager
def _autocast(accelerator: Accelerator) -> Iterator[None]:
    with accelerator.autocast():
        torch.set_autocast_cache_enabled(False)
        torch.autocast_decrement_nesting()  # only the outermost autocast clears its cache: make that the model's
        try:
            yield
        finally:
            torch.autocast_increment_nesting()
