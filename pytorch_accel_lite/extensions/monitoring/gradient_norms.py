"""Sums of gradient norms over an epoch, on a GPU without waiting for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pytorch_accel_lite.extension_tools.modules_and_devices import accumulation_dtype, to_float


@dataclass(eq=False, repr=False)
class GradientNorms:
    """The gradient norms of an epoch: their number, sum and maximum.

    Args:
        sum: the sum of the norms
        max: the largest norm
        clipped: the number of norms above the limit; ``None`` without a limit
        count: the number of norms
    """

    sum: float | torch.Tensor = 0.0
    max: float | torch.Tensor = 0.0
    clipped: float | torch.Tensor | None = None
    count: int | torch.Tensor = 0

    def add(self, total: torch.Tensor, limit: float | None, only_finite: bool = False) -> float | torch.Tensor:
        """Add a norm, and return it: as a number, or on a GPU as an unread tensor.

        Args:
            limit: the norm to which gradients are clipped, if they are
            only_finite: leave out a norm that is infinite or NaN
        """
        norm: float | torch.Tensor = to_float(total.detach()) if total.is_cpu else total.detach()
        added, counted = _finite_only(norm) if only_finite else (norm, 1)
        if isinstance(added, torch.Tensor):
            largest = self.max.to(added.device) if isinstance(self.max, torch.Tensor) else self.max  # loaded on the CPU
            self.max = torch.clamp(added, min=largest)
            self.sum = added.to(accumulation_dtype(added.device)) + self.sum
        else:
            self.max = added if added > self.max or math.isnan(added) else self.max
            self.sum = added + self.sum
        self.count = counted + self.count
        if limit is not None:
            self.clipped = (added > limit) + (0.0 if self.clipped is None else self.clipped)
        return norm


def _finite_only(norm: float | torch.Tensor) -> tuple[float | torch.Tensor, int | torch.Tensor]:
    """Return a norm and 1, or zeros in place of both if it is not finite."""
    if isinstance(norm, torch.Tensor):
        is_finite = norm.isfinite()
        return torch.where(is_finite, norm, 0.0), is_finite
    return (norm, 1) if math.isfinite(norm) else (0.0, 0)
