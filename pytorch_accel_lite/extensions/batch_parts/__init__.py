"""Batches in parts, for steps that compute the parts one after another."""

from __future__ import annotations

from pytorch_accel_lite.extensions.batch_parts.batch_parts import (
    as_returned,
    concatenate_if_possible,
    merge_outputs,
    split_into_parts,
)

__all__ = ["as_returned", "concatenate_if_possible", "merge_outputs", "split_into_parts"]
