"""Writing, verifying, finding and loading: portable checkpoints of weights, and training states."""

from pytorch_accel_lite.checkpoint.portable import (
    canonical_state,
    fit_state,
    read_checkpoint,
    write_checkpoint,
    write_weights,
)
from pytorch_accel_lite.checkpoint.training_state import DamagedStateError, verify_state

__all__ = [
    "DamagedStateError",
    "canonical_state",
    "fit_state",
    "read_checkpoint",
    "verify_state",
    "write_checkpoint",
    "write_weights",
]  # fmt: skip
