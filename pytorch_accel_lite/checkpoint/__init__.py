"""Writing, verifying, finding and loading: portable checkpoints of weights, and training states."""

from pytorch_accel_lite.checkpoint.full_state import (
    fit_model_state,
    full_state_dict,
    gathered,
    load_optimizer_state,
    model_state,
)
from pytorch_accel_lite.checkpoint.training_state import DamagedStateError, verify_state
from pytorch_accel_lite.checkpoint.weights import read_checkpoint, write_checkpoint, write_weights

__all__ = [
    "DamagedStateError",
    "fit_model_state",
    "full_state_dict",
    "gathered",
    "load_optimizer_state",
    "model_state",
    "read_checkpoint",
    "verify_state",
    "write_checkpoint",
    "write_weights",
]  # fmt: skip
