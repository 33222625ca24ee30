"""Leaving gradients unreduced within an accumulation window, until its last batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from accelerate import Accelerator
from torch import nn

_NOTHING = nullcontext()


def no_sync_within_window(
    accelerator: Accelerator, model: nn.Module, ends_window: bool
) -> AbstractContextManager[None]:
    """Return a context for the backward pass on a batch, in which gradients are reduced only if it ends a window.

    Also sets ``accelerator.sync_gradients``, which stays set after the context.
    """
    accelerator.sync_gradients = ends_window
    if ends_window or accelerator.num_processes == 1:
        return _NOTHING
    return accelerator.no_sync(model)  # type: ignore[no-any-return]
