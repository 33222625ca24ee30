"""Functions that the package's own extensions use, besides ``extending.py``. They may change in any version."""

from pytorch_accel_lite.base.argument_checks import check_positive_int, check_range
from pytorch_accel_lite.base.constructor_calls import arguments_of, library_attributes
from pytorch_accel_lite.base.devices import capacity_of, is_out_of_memory, module_of
from pytorch_accel_lite.base.error_texts import describe_error, notes_of
from pytorch_accel_lite.base.extras import install_command
from pytorch_accel_lite.base.formatting import listed
from pytorch_accel_lite.base.generator_states import (
    capture_generators,
    find_held_generators,
    preserving_held_generators,
    restore_generator,
    restore_generators,
)
from pytorch_accel_lite.base.kernel_settings import deterministic_kernels
from pytorch_accel_lite.base.nested_data import parts_in, tensors_in
from pytorch_accel_lite.base.paths import may_differ
from pytorch_accel_lite.base.reachable import RandomGenerator, nested_in, reachable_from
from pytorch_accel_lite.base.seeding import seed_held_generators
from pytorch_accel_lite.base.sharded_weights import local_shard, tensor_parallel_size
from pytorch_accel_lite.base.templates import Column, render
from pytorch_accel_lite.base.tool_reports import Report
from pytorch_accel_lite.base.types import ChosenModules
from pytorch_accel_lite.base.unwrapping import unsharded_class
from pytorch_accel_lite.base.user_code import checked_by, is_from_this_package, is_in_this_package, is_overridden
from pytorch_accel_lite.base.user_warnings import warn_outside
from pytorch_accel_lite.checkpoint.disk.shards import every_part_is_held, find_tensors
from pytorch_accel_lite.checkpoint.models.model_forms import is_of_peft, is_of_timm
from pytorch_accel_lite.checkpoint.models.trained_object_states import buffers_beside_model
from pytorch_accel_lite.checkpoint.models.trained_objects import (
    loose_parameters,
    saved_optimizers,
    trained_objects,
    unsaved_attribute_names,
)
from pytorch_accel_lite.checkpoint.models.weights import verify_weights
from pytorch_accel_lite.data.batch_adapter import TARGET_KEYS, LossShapeError, shapes_are_known
from pytorch_accel_lite.data.batch_slices import WHAT_CAN_BE_SPLIT, select_samples
from pytorch_accel_lite.data.batches import infer_batch_size, is_as_long, is_packed, is_single_sample
from pytorch_accel_lite.data.concatenation import ListOfSamples, concatenate
from pytorch_accel_lite.data.consistency import PASS_OWN_SHARD, checksum_of_indices
from pytorch_accel_lite.data.loader import copy_loader, to_device
from pytorch_accel_lite.data.loader_choice import faster_data
from pytorch_accel_lite.data.map_loader import MapLoader
from pytorch_accel_lite.data.reading import add_missing_note, list_samples, names_sample, reader_of
from pytorch_accel_lite.data.shares import share_bounds
from pytorch_accel_lite.data.step_outputs import check_items, complete_output
from pytorch_accel_lite.distributed.control_group import ControlGroup
from pytorch_accel_lite.distributed.gradient_sync import average_gradients, no_sync_within_window
from pytorch_accel_lite.distributed.launch import die_with_parent
from pytorch_accel_lite.distributed.lost_processes import names_connection
from pytorch_accel_lite.distributed.ranks import chosen_timeout, set_timeout, timeout_of, use_ranks
from pytorch_accel_lite.distributed.shard_holders import Holders, current_holders, use_holders
from pytorch_accel_lite.distributed.shutdown import open_trainers
from pytorch_accel_lite.distributed.stack_frames import (
    MACHINERY,
    describe_call,
    describe_frame,
    innermost_function,
    is_in_backward,
    is_library_frame,
)
from pytorch_accel_lite.loop.extra_passes import loss_of
from pytorch_accel_lite.loop.fit import prepare_training
from pytorch_accel_lite.loop.guards.dataset_checks import check_dataset
from pytorch_accel_lite.loop.guards.trainer_arguments import check_training
from pytorch_accel_lite.loop.guards.training_batches import min_share_for_batch_norm
from pytorch_accel_lite.loop.inference import inference_run, unwrapped_model
from pytorch_accel_lite.loop.lifecycle import entering
from pytorch_accel_lite.loop.model_preparation import prepare_model, release_model
from pytorch_accel_lite.loop.run_loaders import create_eval_loaders, create_train_loader
from pytorch_accel_lite.loop.snapshot import preserving_attributes, replaced
from pytorch_accel_lite.loop.training import run_step
from pytorch_accel_lite.optimizers.optimizer_parts import optimized_parameters
from pytorch_accel_lite.optimizers.optimizer_steps import needs_closure
from pytorch_accel_lite.optimizers.optimizer_types import CreateScheduler
from pytorch_accel_lite.optimizers.rates import Options, initial_options, layer_scales
from pytorch_accel_lite.run.accumulation import as_weight
from pytorch_accel_lite.run.callback_handler import named_callbacks
from pytorch_accel_lite.run.error_notes_seam import explain, explaining
from pytorch_accel_lite.run.events import EVENTS, events_between
from pytorch_accel_lite.run.history import count_values
from pytorch_accel_lite.run.metric_panels import best_of, direction_of, is_monitor, panels_by_metric
from pytorch_accel_lite.run.trained_parts import (
    all_optimized_parameters,
    buffers_in,
    other_modules,
    other_optimizers,
    parameters_not_in_model,
    registered_objects,
    set_optimizer_modes,
)
from pytorch_accel_lite.steps.choice import create_step

__all__ = [
    # Kinds of steps, and their conflicts.
    "as_weight", "average_gradients", "buffers_beside_model", "buffers_in", "check_items", "complete_output",
    "needs_closure", "no_sync_within_window",
    # Batches that fail.
    "explain", "explaining", "list_samples", "names_sample", "notes_of",
    # Steps that are divided into a fixed number of shares.
    "deterministic_kernels", "share_bounds",
    # Models with sharded weights.
    "chosen_timeout", "find_tensors", "parameters_not_in_model", "tensor_parallel_size", "verify_weights",
    # The processes of a job.
    "ControlGroup", "Holders", "MACHINERY", "current_holders", "describe_call", "describe_frame", "die_with_parent",
    "every_part_is_held", "innermost_function", "is_in_backward", "is_library_frame", "names_connection",
    "open_trainers", "set_timeout", "timeout_of", "use_holders", "use_ranks",
    # What a run has drawn and recorded, which is restored after a step or an evaluation that does not count.
    "capture_generators", "count_values", "find_held_generators", "preserving_attributes", "preserving_held_generators",
    "restore_generators",
    # For attributes of users in training states.
    "RandomGenerator", "is_from_this_package", "is_in_this_package", "library_attributes", "loose_parameters",
    "may_differ", "named_callbacks", "restore_generator", "trained_objects", "unsaved_attribute_names",
    # For the settings of runs in training states.
    "Options", "arguments_of", "initial_options", "saved_optimizers", "unsharded_class",
    # For fingerprints of data.
    "PASS_OWN_SHARD", "checksum_of_indices", "seed_held_generators",
    # For saved models, and their companion files.
    "is_of_peft", "is_of_timm", "reachable_from",
    # Trials.
    "EVENTS", "capacity_of", "check_dataset", "check_training", "copy_loader", "create_eval_loaders", "create_step",
    "create_train_loader", "entering", "events_between", "faster_data", "inference_run", "is_out_of_memory", "loss_of",
    "min_share_for_batch_norm", "module_of", "prepare_model", "prepare_training", "release_model", "replaced",
    "run_step", "set_optimizer_modes", "unwrapped_model",
    # The parts of trainers and batches.
    "ListOfSamples", "LossShapeError", "MapLoader", "TARGET_KEYS", "WHAT_CAN_BE_SPLIT", "add_missing_note",
    "all_optimized_parameters", "concatenate", "infer_batch_size", "is_as_long", "is_overridden", "is_packed",
    "is_single_sample", "layer_scales", "local_shard", "nested_in", "optimized_parameters", "other_modules",
    "other_optimizers", "parts_in", "reader_of", "registered_objects", "select_samples", "shapes_are_known",
    "tensors_in", "to_device",
    # Plots and pages.
    "Column", "best_of", "direction_of", "is_monitor", "panels_by_metric", "render",
    # Help.
    "ChosenModules", "CreateScheduler", "Report", "check_positive_int", "check_range", "checked_by", "describe_error",
    "install_command", "listed", "warn_outside",
]  # fmt: skip
