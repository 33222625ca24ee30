"""Several optimizers that step together."""

from __future__ import annotations

import torch
from torch import nn


def two_optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """One for weights, one for biases."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return {
        "matrix": torch.optim.SGD(matrices, lr=0.05, momentum=0.9),
        "rest": torch.optim.AdamW([{"params": rest[:1]}, {"params": rest[1:], "lr": 0.01}], lr=0.02),
    }
