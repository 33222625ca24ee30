"""Writing, verifying, finding and loading portable checkpoints of weights and training states."""

from pytorch_accel_lite.checkpoint.files import read_checkpoint, write_checkpoint
from pytorch_accel_lite.checkpoint.training_state import DamagedStateError, verify_state
from pytorch_accel_lite.checkpoint.weights import fit_model_state, model_state

__all__ = [
    "DamagedStateError", "fit_model_state", "model_state", "read_checkpoint", "verify_state", "write_checkpoint"
]  # fmt: skip
