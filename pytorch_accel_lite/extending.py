"""Names for extensions, besides the names for users.

The run, and the seams at which it can be changed; trials, which try a program and leave no trace; the parts of a
trainer besides its model; the parts of batches; and the form of results and errors.
"""

from pytorch_accel_lite.base.backends import deterministic_kernels
from pytorch_accel_lite.base.constructor_calls import library_attributes
from pytorch_accel_lite.base.devices import capacity_of, is_out_of_memory
from pytorch_accel_lite.base.environment import install_command
from pytorch_accel_lite.base.generator_states import capture_generators, restore_generator, restore_generators
from pytorch_accel_lite.base.inspection import nested_in
from pytorch_accel_lite.base.modules import local_shard
from pytorch_accel_lite.base.reachable import RandomGenerator, reachable_from
from pytorch_accel_lite.base.templates import Column, render
from pytorch_accel_lite.base.text import describe_error, listed
from pytorch_accel_lite.base.tool_reports import Report
from pytorch_accel_lite.base.types import ChosenModules, JsonObject
from pytorch_accel_lite.base.unknown_names import OTHER_LIBRARIES
from pytorch_accel_lite.base.user_code import checked_by, is_from_this_package, is_in_this_package, is_overridden
from pytorch_accel_lite.base.user_warnings import warn_outside
from pytorch_accel_lite.base.validation import check_positive_int, check_range
from pytorch_accel_lite.checkpoint.disk.checksums import verify as verify_tensors
from pytorch_accel_lite.checkpoint.disk.files import FENCES, check_is_shared, load_verified, write_tensors
from pytorch_accel_lite.checkpoint.disk.locks import lock_path
from pytorch_accel_lite.checkpoint.disk.shards import every_part_is_held
from pytorch_accel_lite.checkpoint.models.companion_files import COMPANION_WRITERS, CompanionWriter, SavedModel
from pytorch_accel_lite.checkpoint.models.model_forms import (
    ADAPTERS,
    MODEL_FORMS,
    ModelForm,
    WriteModel,
    is_of_peft,
    is_of_timm,
)
from pytorch_accel_lite.checkpoint.models.trained_object_states import buffers_beside_model
from pytorch_accel_lite.checkpoint.models.trained_objects import (
    loose_parameters,
    trained_objects,
    unsaved_attribute_names,
)
from pytorch_accel_lite.checkpoint.states.directory import CapturedState, read_model, read_verified, write_files
from pytorch_accel_lite.checkpoint.states.manifest import catch_damage, manifest_text, read_manifest
from pytorch_accel_lite.checkpoint.states.recorded_settings import may_differ
from pytorch_accel_lite.checkpoint.states.store import StateStore
from pytorch_accel_lite.checkpoint.stores import STORES, Store, read_state
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.data.batches import (
    TARGET_KEYS,
    BatchAdapter,
    BatchOutput,
    Share,
    complete_output,
    infer_batch_size,
    is_as_long,
    is_packed,
    is_single_sample,
    parts_in,
    tensors_in,
)
from pytorch_accel_lite.data.loss_errors import LossFunction, LossShapeError, shapes_are_known
from pytorch_accel_lite.data.shares import Shares, share_bounds
from pytorch_accel_lite.data.splitting import ListOfSamples, concatenate, concatenate_if_possible, select_samples
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.control_group import ControlGroup, OtherCallError
from pytorch_accel_lite.distributed.data_ranks import mesh_infos, shard_dim
from pytorch_accel_lite.distributed.gradient_averaging import average_gradients
from pytorch_accel_lite.distributed.launch import die_with_parent
from pytorch_accel_lite.distributed.lost_processes import ProcessLostError, names_connection
from pytorch_accel_lite.distributed.meshes import Holders, use_holders
from pytorch_accel_lite.distributed.no_sync import no_sync_within_window
from pytorch_accel_lite.distributed.observers import OBSERVERS, JobObserver
from pytorch_accel_lite.distributed.ranks import set_timeout, timeout_of, use_ranks
from pytorch_accel_lite.distributed.shutdown import open_trainers
from pytorch_accel_lite.distributed.stack_frames import (
    MACHINERY,
    Stack,
    describe_call,
    describe_frame,
    innermost_function,
    is_in_backward,
    is_library_frame,
)
from pytorch_accel_lite.distributed.trainer_protocol import OpenTrainer
from pytorch_accel_lite.loop.extra_passes import loss_of
from pytorch_accel_lite.loop.guards.arguments import check_dataset
from pytorch_accel_lite.loop.guards.error_notes import explain, list_samples
from pytorch_accel_lite.loop.guards.out_of_memory import MEMORY_ADVICE
from pytorch_accel_lite.loop.inference import INFERENCE_STEP, unwrapped_model
from pytorch_accel_lite.loop.model_preparation import MODEL_CHANGES
from pytorch_accel_lite.loop.plain_step import PlainStep, backward
from pytorch_accel_lite.loop.run_setup import inference_run
from pytorch_accel_lite.loop.sharded_models import shard_model
from pytorch_accel_lite.loop.snapshot import Snapshot, StepSnapshot, preserving_attributes, replaced
from pytorch_accel_lite.optimizers.operations import CreateScheduler, needs_closure, optimized_parameters
from pytorch_accel_lite.optimizers.rates import layer_scales
from pytorch_accel_lite.run.accumulation import GradientWindow, as_weight
from pytorch_accel_lite.run.callback_handler import CallbackHandler, named_callbacks
from pytorch_accel_lite.run.division import DIVISIONS, Division, create_division
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.history import count_values
from pytorch_accel_lite.run.job_queues import JOB_QUEUES, JobQueue
from pytorch_accel_lite.run.losses import LossTracker, LossTrackers
from pytorch_accel_lite.run.metric_panels import (
    MONITORS,
    MetricPanel,
    best_of,
    direction_of,
    is_monitor,
    panels_by_metric,
)
from pytorch_accel_lite.run.modules_and_optimizers import (
    buffers_in,
    other_modules,
    other_optimizers,
    registered_objects,
)
from pytorch_accel_lite.run.parts import LoadedWeights
from pytorch_accel_lite.run.plots import PLOTS, Plots
from pytorch_accel_lite.run.run import USER_ATTRIBUTES, InferenceStep, Run, Step, TrainerLike, UserAttributes
from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.skipped_batches import SKIPPED, SkippedBatches, SkippedStep
from pytorch_accel_lite.run.stops import NonFiniteLossError, RunInterruptedError, StopTrainingError
from pytorch_accel_lite.run.trainer_parameters import all_optimized_parameters
from pytorch_accel_lite.run.training_state import TrainingState
from pytorch_accel_lite.run.watched_metric import WatchedMetric
from pytorch_accel_lite.steps.choice import replace_step
from pytorch_accel_lite.steps.compilation import COMPILED, STEP_COMPILER, StepCompiler
from pytorch_accel_lite.steps.features import (
    CLOSURE,
    FP16,
    MANUAL,
    MICROBATCHES,
    RECOMPUTED,
    SHARDED,
    SKIPPED_BATCHES,
    STEP_KINDS,
    Conflict,
    Feature,
)
from pytorch_accel_lite.steps.sharded import ShardedStep
from pytorch_accel_lite.tools.batch_parts import as_returned, merge_outputs, split_into_parts
from pytorch_accel_lite.tools.speed_advice import faster_data
from pytorch_accel_lite.tools.trial import Trial
from pytorch_accel_lite.tools.user_callbacks import UserCallbacks

__all__ = [
    # The run.
    "CallbackHandler", "NonFiniteLossError", "Ranks", "Run", "RunInterruptedError", "RunRequest", "Step",
    "StopTrainingError", "TrainerCallback", "TrainerLike", "TrainingState", "WatchedMetric",
    # Seams.
    "COMPANION_WRITERS", "CompanionWriter", "DIVISIONS", "Division", "FENCES", "INFERENCE_STEP", "InferenceStep",
    "JOB_QUEUES", "JobObserver", "JobQueue", "MEMORY_ADVICE", "MODEL_CHANGES", "MODEL_FORMS", "ModelForm",
    "OBSERVERS", "OTHER_LIBRARIES", "PLOTS", "Plots", "STEP_COMPILER", "STEP_KINDS", "STORES", "StateStore",
    "StepCompiler", "Store", "USER_ATTRIBUTES", "UserAttributes", "create_division", "replace_step",
    # Kinds of steps, and their conflicts.
    "CLOSURE", "COMPILED", "Conflict", "FP16", "Feature", "GradientWindow", "MANUAL", "MICROBATCHES", "PlainStep",
    "RECOMPUTED", "SHARDED", "SKIPPED_BATCHES", "ShardedStep", "as_returned", "as_weight", "average_gradients",
    "backward", "buffers_beside_model", "buffers_in", "complete_output", "merge_outputs", "needs_closure",
    "no_sync_within_window",
    # Batches that fail.
    "OtherCallError", "ProcessLostError", "SKIPPED", "SkippedBatches", "SkippedStep", "explain", "list_samples",
    # Steps that are divided into a fixed number of shares.
    "LossTracker", "LossTrackers", "Share", "Shares", "concatenate_if_possible", "deterministic_kernels", "mesh_infos",
    "shard_dim", "share_bounds",
    # The processes of a job.
    "MACHINERY", "ControlGroup", "Holders", "OpenTrainer", "Stack", "describe_call", "describe_frame",
    "die_with_parent", "every_part_is_held", "innermost_function", "is_in_backward",
    "is_library_frame", "names_connection", "open_trainers", "set_timeout", "timeout_of", "use_holders", "use_ranks",
    # What a run has drawn and recorded, which is restored after a step or an evaluation that does not count.
    "Snapshot", "StepSnapshot", "capture_generators", "count_values", "preserving_attributes", "restore_generators",
    # For stores, and for other files of several processes.
    "CapturedState", "JsonObject", "catch_damage", "check_is_shared", "load_verified", "lock_path", "manifest_text",
    "read_manifest", "read_model", "read_state", "read_verified", "write_files",
    # For attributes of users in training states.
    "RandomGenerator", "is_from_this_package", "is_in_this_package", "library_attributes", "loose_parameters",
    "may_differ", "named_callbacks", "restore_generator", "trained_objects", "unsaved_attribute_names",
    # For saved models, and their companion files.
    "ADAPTERS", "LoadedWeights", "SavedModel", "WriteModel", "is_of_peft", "is_of_timm", "reachable_from",
    "verify_tensors", "write_tensors",
    # Trials.
    "Trial", "UserCallbacks", "capacity_of", "check_dataset", "faster_data", "inference_run", "is_out_of_memory",
    "loss_of", "replaced", "shard_model", "split_into_parts", "unwrapped_model",
    # The parts of trainers and batches.
    "TARGET_KEYS", "Batch", "BatchAdapter", "BatchOutput", "ListOfSamples", "LossFunction", "LossShapeError",
    "all_optimized_parameters", "concatenate", "infer_batch_size", "is_as_long", "is_overridden", "is_packed",
    "is_single_sample", "layer_scales", "local_shard", "nested_in", "optimized_parameters", "other_modules",
    "other_optimizers", "parts_in", "registered_objects", "select_samples", "shapes_are_known", "tensors_in",
    # Plots and pages.
    "Column", "MONITORS", "MetricPanel", "best_of", "direction_of", "is_monitor", "panels_by_metric", "render",
    # Help.
    "ChosenModules", "CreateScheduler", "Report", "check_positive_int", "check_range", "checked_by", "describe_error",
    "install_command", "listed", "warn_outside",
]  # fmt: skip
