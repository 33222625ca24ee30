"""Torch's global settings that decide how numbers are computed: which kernels, and in which precision."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

_CUDNN: Any = torch.backends.cudnn
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class BackendSettings:
    """Settings of torch that hold for the runs of a trainer; ``None`` leaves one as it is.

    :param deterministic: as for ``torch.use_deterministic_algorithms``; ``True`` also turns off ``cudnn_benchmark``
    :param cudnn_benchmark: let cuDNN try kernels and choose the fastest for each shape
    :param tf32: compute matrix products and convolutions of float32 numbers with 10 bits of their mantissas, on GPUs
        that can
    :raises TypeError: for other values
    :raises ValueError: if a choice by speed is to be deterministic
    """

    deterministic: bool | None = None
    cudnn_benchmark: bool | None = None
    tf32: bool | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be True, False, or None for torch's own setting.")
        if self.deterministic and self.cudnn_benchmark:
            raise ValueError(
                "cudnn_benchmark=True does not work with deterministic=True: it chooses kernels by their speed, which "
                "differs between runs. Leave one of them out."
            )

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Change the settings in a block, and restore them after it."""
        with ExitStack() as undo:
            if self.deterministic is not None:
                _set_deterministic(self.deterministic, undo.callback)
            if self.deterministic or self.cudnn_benchmark is not None:
                undo.callback(setattr, _CUDNN, "benchmark", _CUDNN.benchmark)
                _CUDNN.benchmark = bool(self.cudnn_benchmark)
            if self.tf32 is not None:
                _set_tf32(self.tf32, undo.callback)
            yield


def _set_deterministic(value: bool, undo: Callable[..., Any]) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    undo(torch.use_deterministic_algorithms, before, warn_only=warns_only)
    torch.use_deterministic_algorithms(value, warn_only=before and warns_only)
    if value and _WORKSPACE not in os.environ:
        os.environ[_WORKSPACE] = ":4096:8"  # without which torch refuses to multiply matrices on a GPU
        undo(os.environ.pop, _WORKSPACE, None)


def _set_tf32(value: bool, undo: Callable[..., Any]) -> None:
    """Set the precision by both of torch's interfaces, which complain about each other when they differ."""
    precision = "tf32" if value else "ieee"
    for operation in _operations():
        undo(setattr, operation, "fp32_precision", operation.fp32_precision)
    with suppress(RuntimeError):  # the user has set it by the other interface
        undo(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    with suppress(RuntimeError):
        undo(setattr, _CUDNN, "allow_tf32", _CUDNN.allow_tf32)
    torch.set_float32_matmul_precision("high" if value else "highest")
    _CUDNN.allow_tf32 = value
    for operation in _operations()[:3]:
        operation.fp32_precision = precision


def _operations() -> list[Any]:
    """Return the operations of a GPU whose precision has an interface of its own, since torch 2.9; last the CPU's."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return []
    return [torch.backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]


def float32_precision() -> str:
    """Return the precision of products of float32 matrices, as ``torch.set_float32_matmul_precision`` names it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it has been set by the interface that knows operations
        precision = torch.backends.cuda.matmul.fp32_precision
        return {"tf32": "high", "bf16": "medium"}.get(precision, "highest")


def describe_settings(is_cuda: bool) -> dict[str, Any]:
    """Return the settings on which the last bits of a computation depend now, in JSON types."""
    settings: dict[str, Any] = {
        "precision of float32 products": float32_precision(),
        "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
    }
    if is_cuda:
        settings["cudnn.benchmark"] = _CUDNN.benchmark
    return settings
