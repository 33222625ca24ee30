"""The seams at which extensions change what a trainer does, and the types that they deal with.

Yours may use them, too. ``extension_tools/`` has the functions and types that extensions share, by subject.
"""

from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.base.types import JsonObject
from pytorch_accel_lite.base.unknown_names import OTHER_LIBRARIES
from pytorch_accel_lite.callbacks.default_callbacks import METRICS
from pytorch_accel_lite.checkpoint.disk.atomic_files import FENCES
from pytorch_accel_lite.checkpoint.disk.checksums import verify as verify_tensors
from pytorch_accel_lite.checkpoint.disk.locks import lock_path
from pytorch_accel_lite.checkpoint.disk.safetensors_files import write_tensors
from pytorch_accel_lite.checkpoint.disk.shared_disks import check_is_shared
from pytorch_accel_lite.checkpoint.models.model_forms import ADAPTERS, MODEL_FORMS, ModelForm, WriteModel
from pytorch_accel_lite.checkpoint.saving import COMPANION_WRITERS, CompanionWriter, SavedModel
from pytorch_accel_lite.checkpoint.states.manifest import catch_damage, manifest_text, read_manifest
from pytorch_accel_lite.checkpoint.states.settings_in_states_seam import SETTINGS_RECORDER, SettingsRecorder
from pytorch_accel_lite.checkpoint.states.state_files import CapturedState, read_model, read_verified, write_files
from pytorch_accel_lite.checkpoint.states.state_store import StateStore
from pytorch_accel_lite.checkpoint.stores_by_url import STORES, Store, read_state
from pytorch_accel_lite.data.batch_adapter import BatchAdapter, LossFunction
from pytorch_accel_lite.data.batches import Batch, Share
from pytorch_accel_lite.data.loader_creation import SEQUENTIAL_READER, SHARED_DATA_CHECKS, SequentialReader
from pytorch_accel_lite.data.sources import BatchOutput
from pytorch_accel_lite.data.steps_and_shares import Shares
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.control_group import OtherCallError
from pytorch_accel_lite.distributed.job_observers_seam import OBSERVERS, JobObserver, OpenTrainer
from pytorch_accel_lite.distributed.lost_processes import ProcessLostError
from pytorch_accel_lite.distributed.stack_frames import Stack
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import MONITORS, MetricPanel
from pytorch_accel_lite.extension_tools.states_and_files import load_verified
from pytorch_accel_lite.extension_tools.texts_and_pages import Plots
from pytorch_accel_lite.loop.inference import INFERENCE_STEP
from pytorch_accel_lite.loop.model_setup import MODEL_CHANGES, STEP_COMPILER, StepCompiler
from pytorch_accel_lite.loop.resuming import SCHEDULE_RECREATION
from pytorch_accel_lite.loop.snapshot import Snapshot, StepSnapshot
from pytorch_accel_lite.run.accumulation import GradientWindow
from pytorch_accel_lite.run.callback_handler import CallbackHandler
from pytorch_accel_lite.run.ending import (
    JOB_QUEUES,
    JobQueue,
    NonFiniteLossError,
    RunInterruptedError,
    StopTrainingError,
)
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.history import HISTORY_TABLE, PLOTS
from pytorch_accel_lite.run.latest_records import LoadedWeights
from pytorch_accel_lite.run.losses import LossTracker, LossTrackers
from pytorch_accel_lite.run.notes_and_checks_seam import ERROR_NOTES, MEMORY_ADVICE, RUN_CHECKS, RunChecks
from pytorch_accel_lite.run.request_and_config import RunRequest, TrainerRunConfig
from pytorch_accel_lite.run.run import (
    SHARDING,
    USER_ATTRIBUTES,
    InferenceStep,
    Run,
    Sharding,
    Step,
    TrainerLike,
    UserAttributes,
)
from pytorch_accel_lite.run.run_data import SKIPPED, SkippedBatches, SkippedStep
from pytorch_accel_lite.run.step_division import DIVISIONS, Division, create_division
from pytorch_accel_lite.run.training_state import TrainingState
from pytorch_accel_lite.run.watched_metric import WatchedMetric
from pytorch_accel_lite.steps.plain_step import PlainStep, backward
from pytorch_accel_lite.steps.step_choice import (
    CLOSURE,
    COMPILED,
    FP16,
    MANUAL,
    MICROBATCHES,
    RECOMPUTED,
    SHARDED,
    SKIPPED_BATCHES,
    STEP_KINDS,
    Conflict,
    Feature,
    replace_step,
)

__all__ = [
    # The run.
    "CallbackHandler", "NonFiniteLossError", "Ranks", "Run", "RunInterruptedError", "RunRequest", "Step",
    "StopTrainingError", "TrainerCallback", "TrainerLike", "TrainerRunConfig", "TrainingState", "WatchedMetric",
    # Seams.
    "COMPANION_WRITERS", "CompanionWriter", "DIVISIONS", "Division", "ERROR_NOTES", "FENCES", "HISTORY_TABLE",
    "INFERENCE_STEP", "InferenceStep", "JOB_QUEUES", "JobObserver", "JobQueue", "MEMORY_ADVICE", "METRICS",
    "MODEL_CHANGES", "MODEL_FORMS", "ModelForm", "OBSERVERS", "OTHER_LIBRARIES", "PLOTS", "Plots", "SEQUENTIAL_READER",
    "RUN_CHECKS", "RunChecks", "SCHEDULE_RECREATION", "SETTINGS_RECORDER", "SHARDING", "SHARED_DATA_CHECKS",
    "STEP_COMPILER", "STEP_KINDS", "STORES", "SequentialReader", "SettingsRecorder", "Sharding", "Slot", "StateStore",
    "StepCompiler", "Store", "USER_ATTRIBUTES", "UserAttributes", "create_division", "replace_step",
    # Kinds of steps, and their conflicts.
    "CLOSURE", "COMPILED", "Conflict", "FP16", "Feature", "GradientWindow", "MANUAL", "MICROBATCHES", "PlainStep",
    "RECOMPUTED", "SHARDED", "SKIPPED_BATCHES", "backward",
    # Batches that fail.
    "OtherCallError", "ProcessLostError", "SKIPPED", "SkippedBatches", "SkippedStep",
    # Steps that are divided into a fixed number of shares.
    "LossTracker", "LossTrackers", "Share", "Shares",
    # The processes of a job.
    "OpenTrainer", "Stack",
    # What a run has drawn and recorded, which is restored after a step or an evaluation that does not count.
    "Snapshot", "StepSnapshot",
    # For stores, and for other files of several processes.
    "CapturedState", "JsonObject", "catch_damage", "check_is_shared", "load_verified", "lock_path", "manifest_text",
    "read_manifest", "read_model", "read_state", "read_verified", "write_files",
    # For saved models, and their companion files.
    "ADAPTERS", "LoadedWeights", "SavedModel", "WriteModel", "verify_tensors", "write_tensors",
    # The parts of trainers and batches.
    "Batch", "BatchAdapter", "BatchOutput", "LossFunction",
    # Plots and pages.
    "MONITORS", "MetricPanel",
]  # fmt: skip
