"""Writing, verifying, finding and loading portable checkpoints of weights and training states."""

from pytorch_accel_lite.checkpoint.files import read_checkpoint, replacing, try_lock, write_checkpoint, write_text
from pytorch_accel_lite.checkpoint.manifest import DamagedStateError, verify_state
from pytorch_accel_lite.checkpoint.summary import print_contents
from pytorch_accel_lite.checkpoint.training_state import read_learned
from pytorch_accel_lite.checkpoint.weights import fit_model_state, model_state

__all__ = [
    "DamagedStateError", "fit_model_state", "model_state", "print_contents", "read_checkpoint", "read_learned",
    "replacing", "try_lock", "verify_state", "write_checkpoint", "write_text",
]  # fmt: skip
