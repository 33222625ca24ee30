"""Writing, verifying, finding and loading portable checkpoints of weights and training states."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.base.paths import as_file_name, file_path, folder_path, local_path
from pytorch_accel_lite.checkpoint.disk.atomic_files import no_link, replacing, try_lock, write_text
from pytorch_accel_lite.checkpoint.disk.checkpoint_files import read_checkpoint, write_checkpoint
from pytorch_accel_lite.checkpoint.models.weights import fit_model_state, model_state
from pytorch_accel_lite.checkpoint.states.manifest import DamagedStateError, verify_state
from pytorch_accel_lite.checkpoint.states.state_files import read_learned
from pytorch_accel_lite.extensions.printed_states import print_contents

__all__ = [
    "as_file_name",
    "file_path",
    "folder_path",
    "local_path",
    "no_link",
    "DamagedStateError",
    "fit_model_state",
    "model_state",
    "print_contents",
    "read_checkpoint",
    "read_learned",
    "replacing",
    "try_lock",
    "verify_state",
    "write_checkpoint",
    "write_text",
]

add_missing_name_errors(__name__)
