"""Prints the error with which a trainer refuses to be made."""

from tests.tasks import quiet_trainer, small_model

try:
    quiet_trainer(small_model())
except RuntimeError as error:
    print(f"RuntimeError: {error}")
