"""Reading and writing weights: portable ``.pt`` checkpoints, written whole or not at all."""

from pytorch_accel_lite.checkpoint.portable import load_state_into, read_checkpoint, write_checkpoint

__all__ = ["load_state_into", "read_checkpoint", "write_checkpoint"]
