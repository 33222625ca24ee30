"""Notes on the errors of a run: where it failed, on which batch, and what to do."""

from pytorch_accel_lite.extending import ERROR_NOTES
from pytorch_accel_lite.extensions.error_notes.notes import add_notes

__all__ = ["add_notes"]

ERROR_NOTES.append(add_notes)
