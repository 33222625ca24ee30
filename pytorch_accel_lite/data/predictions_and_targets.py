"""Finding the predictions and the targets of a batch, which callbacks compare."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.data.batch_adapter import TARGET_KEYS
from pytorch_accel_lite.data.sources import BatchData


def default_transform(batch: BatchData, batch_output: Mapping[str, Tree]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predictions and targets of a batch: the default ``transform`` of callbacks that compare them.

    Raises:
        ValueError: if predictions or targets cannot be determined
    """
    outputs = batch_output.get("model_outputs", batch_output)  # an overridden method may return logits directly
    predictions = outputs if isinstance(outputs, torch.Tensor) else _value_of(outputs, ("logits", "predictions"))
    if isinstance(batch, Mapping):
        targets = _value_of(batch, TARGET_KEYS)
    else:
        targets = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if not isinstance(predictions, torch.Tensor) or not isinstance(targets, torch.Tensor):
        raise ValueError(
            f"Cannot find predictions and targets in a model output of type {type(outputs).__name__} and a batch of "
            f"type {type(batch).__name__}. Pass transform=lambda batch, batch_output: (preds, targets)."
        )
    return predictions, targets


def _value_of(values: Tree, names: tuple[str, ...]) -> Tree:
    for name in names:
        result = values.get(name) if isinstance(values, Mapping) else getattr(values, name, None)
        if result is not None:
            return result
    return None
