"""The parts of a run, for trials and other runs within a run."""

from __future__ import annotations

from pytorch_accel_lite.base.modules import tensor_parallel_size
from pytorch_accel_lite.loop.fit import prepare_training
from pytorch_accel_lite.loop.guards.arguments_and_datasets import check_dataset, check_training
from pytorch_accel_lite.loop.guards.batch_norm import min_share_for_batch_norm
from pytorch_accel_lite.loop.inference import inference, inference_run, unwrapped_model
from pytorch_accel_lite.loop.lifecycle import entering
from pytorch_accel_lite.loop.loaders_and_lengths import set_eval_loaders, set_train_loader
from pytorch_accel_lite.loop.model_setup import prepare_model, release_model
from pytorch_accel_lite.loop.scheduling import create_from_options
from pytorch_accel_lite.loop.snapshot import leaving_no_trace, preserving_attributes, replaced
from pytorch_accel_lite.loop.training import loss_of, run_step
from pytorch_accel_lite.run.notes_and_checks_seam import add_error_notes, adding_error_notes
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.run_data import DataArguments
from pytorch_accel_lite.run.scheduler_steps import step_after_update
from pytorch_accel_lite.steps.step_choice import create_step

__all__ = [
    "DataArguments", "add_error_notes", "adding_error_notes", "check_dataset", "check_training", "set_eval_loaders",
    "create_from_options", "create_step", "set_train_loader", "entering", "inference", "inference_run",
    "is_stepped_after_updates", "leaving_no_trace", "loss_of", "min_share_for_batch_norm", "prepare_model",
    "prepare_training", "preserving_attributes", "release_model", "replaced", "run_step", "step_after_update",
    "tensor_parallel_size", "unwrapped_model",
]  # fmt: skip


def is_stepped_after_updates(trainer: TrainerLike) -> bool:
    """Whether the scheduler is stepped after each update that is not skipped."""
    return trainer.scheduler is not None and trainer.current_run.request.scheduler_interval == "update"
