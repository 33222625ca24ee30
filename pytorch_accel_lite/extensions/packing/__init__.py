"""Sequences of tokens: packed in rows without padding, and in batches by a budget of tokens."""

from pytorch_accel_lite.extensions.packing.packing import (
    PackSequences,
    packed_attention,
    packed_mask,
    packed_mask_function,
    unpack,
)
from pytorch_accel_lite.extensions.packing.token_batches import TokenBatchSampler

__all__ = ["PackSequences", "TokenBatchSampler", "packed_attention", "packed_mask", "packed_mask_function", "unpack"]
