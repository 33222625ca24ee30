"""Batch norm with statistics over the batches of all processes."""

from pytorch_accel_lite.extensions.sync_batch_norm.convert_sync_batch_norm_callback import (
    ConvertSyncBatchNormCallback,
    synchronised,
)

__all__ = ["ConvertSyncBatchNormCallback", "synchronised"]
