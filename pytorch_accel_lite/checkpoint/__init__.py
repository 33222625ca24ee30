"""Writing, verifying, finding and loading: portable checkpoints of weights, and training states."""

from pytorch_accel_lite.checkpoint.portable import read_checkpoint, write_checkpoint, write_weights
from pytorch_accel_lite.checkpoint.training_state import DamagedStateError, verify_state
from pytorch_accel_lite.checkpoint.whole import fit_model_state, gathered, load_optimizer_state, model_state

__all__ = [
    "DamagedStateError",
    "gathered",
    "fit_model_state",
    "load_optimizer_state",
    "model_state",
    "read_checkpoint",
    "verify_state",
    "write_checkpoint",
    "write_weights",
]  # fmt: skip
