"""Leaving gradients unreduced within an accumulation window, until its last batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from accelerate import Accelerator
from torch import nn

_NOTHING = nullcontext()


def no_sync_within_window(
    accelerator: Accelerator, model: nn.Module, ends_window: bool
) -> AbstractContextManager[None]:
    """Return a context in which ``DistributedDataParallel`` reduces gradients only at the end of a window."""
    accelerator.sync_gradients = ends_window
    if ends_window or accelerator.num_processes == 1:
        return _NOTHING
    return accelerator.no_sync(model)  # type: ignore[no-any-return]
