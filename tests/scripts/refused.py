"""Prints the error with which a trainer refuses to be made, or on how many processes it was made."""

from accelerate import PartialState

from tests.small_models import adamw_trainer, float64_model

PartialState()
try:
    print(f"made on {adamw_trainer(float64_model()).accelerator.num_processes} processes")
except RuntimeError as error:
    print(f"RuntimeError: {error}")
