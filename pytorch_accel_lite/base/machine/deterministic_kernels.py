"""Torch's global settings for the kernels and the precision of computations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_CUDNN = torch.backends.cudnn
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_kernels(wanted: bool | None) -> Iterator[None]:
    """Set ``torch.use_deterministic_algorithms`` for a block; if true, cuDNN does not choose kernels by their speed.

    Args:
        wanted: ``None`` leaves the user's own settings as they are
    """
    with ExitStack() as undo:
        if wanted is not None:
            before = torch.are_deterministic_algorithms_enabled()
            warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
            undo.callback(torch.use_deterministic_algorithms, before, warn_only=warns_only)
            torch.use_deterministic_algorithms(bool(wanted), warn_only=before and warns_only)
        if wanted:
            undo.callback(setattr, _CUDNN, "benchmark", _CUDNN.benchmark)
            _CUDNN.benchmark = False
            if _WORKSPACE not in os.environ:
                os.environ[_WORKSPACE] = ":4096:8"  # otherwise, torch refuses to multiply matrices on a GPU
                undo.callback(os.environ.pop, _WORKSPACE, None)
        yield


def kernel_settings(is_cuda: bool) -> dict[str, object]:
    """Return the current settings that affect the last bits of a computation, in JSON types."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the precision was set per operation, by torch's newer interface
        precision = {"tf32": "high", "bf16": "medium"}.get(torch.backends.cuda.matmul.fp32_precision, "highest")
    settings: dict[str, object] = {
        "precision of float32 products": precision,
        "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
    }
    if is_cuda:
        settings["cudnn.benchmark"] = _CUDNN.benchmark
    return settings
