"""``Run``, the state of a call of ``train``, ``evaluate`` or ``predict``, and the interfaces of what refers to it.

These are its step, the trainer, and at the end what extensions fill.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.missing_extensions import missing_extension_text
from pytorch_accel_lite.base.paths import PathOrFile, StrPath
from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.base.types import ChosenModules, HasStateDict, StateDict, Tree
from pytorch_accel_lite.base.user_code import overridden_methods
from pytorch_accel_lite.base.weak_sets import TransientSet
from pytorch_accel_lite.data.batch_adapter import LossFunction
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.loader_base import ShardedLoader
from pytorch_accel_lite.data.loader_creation import LoaderKwargs
from pytorch_accel_lite.data.named_datasets import as_one_dataset
from pytorch_accel_lite.data.sources import BatchData, BatchOutput, Data, Index, NamedData, find_length
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.optimizers.optimizer_parts import SchedulerFactory, TrainerOptimizer, TrainerScheduler
from pytorch_accel_lite.optimizers.scheduled_options import Options
from pytorch_accel_lite.run.accumulation import Accumulation, Count, GradientWindow
from pytorch_accel_lite.run.callback_handler import CallbackHandler
from pytorch_accel_lite.run.ending import RunEnd, StopCoordinator
from pytorch_accel_lite.run.events import Phase
from pytorch_accel_lite.run.goodput import Goodput
from pytorch_accel_lite.run.history import MetricValue, RunHistory, counts_before_growth
from pytorch_accel_lite.run.intervals import Interval
from pytorch_accel_lite.run.latest_records import LatestRecords
from pytorch_accel_lite.run.losses import LossTrackers
from pytorch_accel_lite.run.prepared_model import PreparedModel
from pytorch_accel_lite.run.progress import EpochPhase, LoopState, Progress
from pytorch_accel_lite.run.request_and_config import RunRequest, TrainerRunConfig
from pytorch_accel_lite.run.run_data import DataArguments, RunData, SkippedBatches
from pytorch_accel_lite.run.step_division import Division
from pytorch_accel_lite.run.training_state import TrainingState

T = TypeVar("T")


class ClippingOrder(NamedTuple):
    """The parameters whose gradients were clipped last.

    Args:
        ids: their ids, in the order of the optimizer
        parameters: the parameters, in the order of the model
    """

    ids: list[int]
    parameters: list[nn.Parameter]


class Step:
    """How a run trains on a batch. A run has exactly one step: the plain step, or one that replaces parts of it.

    This class has defaults for everything that other code asks of a step. What only one kind of step needs is in its
    class. All methods but those for states take the trainer and the run.

    ``create_step()`` constructs a step on each process alone, and then calls ``begin_replicas()``. In a training run,
    but not in a trial, ``begin()`` precedes the first batch, and ``end()`` follows the last one.

    Attributes:
        closure: argument of the optimizer's ``step``: nothing, or a function that recomputes the gradients
        updates_one_by_one: whether the step updates each optimizer separately
        updating: name of the optimizer being updated, or updated last, if they are updated one by one
        num_microbatches: number of parts that each batch is split into
        gradient_norm: the total norm of the gradients of the current update, if it has been computed
        clipping_order: the parameters whose gradients were clipped last, if any
        skips_update: whether the current update is skipped by ``skip_update()``; after a step that updates optimizers
            one by one, whether any of them was skipped
        can_skip_update: whether ``skip_update()`` may be called: in an update whose optimizer step is still to be made,
            or is being made
        skipped_updates: number of updates of the run for which ``trainer.update_was_skipped`` was true
    """

    closure: tuple[Callable[[], torch.Tensor]] | tuple[()] = ()
    updates_one_by_one = False
    updating = ""
    num_microbatches = 1

    def __init__(self) -> None:
        self.gradient_norm: torch.Tensor | None = None
        self.clipping_order: ClippingOrder | None = None
        self.skips_update = False
        self.can_skip_update = False
        self.skipped_updates = 0

    @property
    def optimizers_never_updated(self) -> list[str]:
        """The names of the optimizers that the run has never updated, if they are updated one by one."""
        return []

    def begin_replicas(self, trainer: TrainerLike, run: Run) -> None:
        """Start with the same values on all processes, and note what each update must equalise.

        A collective, called once on every process, even a single one, when the step has been constructed.
        """

    def begin(self, trainer: TrainerLike, run: Run) -> None:
        """Prepare for the first batch of a training run. Not called in a trial."""

    def end(self, trainer: TrainerLike, run: Run) -> None:
        """Called after the last batch of a training run that has not failed, before its ending events."""

    def optimizer_to_update(self, trainer: TrainerLike, run: Run) -> TrainerOptimizer:
        """Return the optimizer of the current update, without the others if they are updated one by one."""
        return trainer.optimizer

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Accumulate the gradients of a batch and track its losses.

        Returns:
            the output of the step, or ``None`` if the batch is skipped
        """
        raise NotImplementedError

    def recover(self, trainer: TrainerLike, run: Run, error: Exception) -> bool:
        """Restore the state from before the window in which an error occurred; return whether it is repeated."""
        return False

    def apply_update(self, trainer: TrainerLike, run: Run) -> None:
        """Update the weights with the gradients of an accumulation window."""
        raise NotImplementedError

    def count_if_skipped(self, trainer: TrainerLike, run: Run) -> bool:
        """Count an update, after its optimizer step, if it was skipped; return whether it was."""
        was_skipped = trainer.update_was_skipped
        self.skipped_updates += was_skipped
        return was_skipped

    def update_optimizer(
        self,
        trainer: TrainerLike,
        run: Run,
        loss: torch.Tensor,
        optimizer: str | None,
        items: Count | None,
        retain_graph: bool,
    ) -> None:
        """Update one optimizer with the gradients of a loss, in an overridden ``train_step``."""
        raise RuntimeError("update() is only for an overridden train_step: the default step updates by itself.")

    def set_accumulation(self, trainer: TrainerLike, run: Run, steps: int) -> None:
        """Set the number of micro-batches in the next accumulation windows."""
        run.window.steps = steps
        run.window.filled = 0

    def state_dict(self) -> StateDict:
        """Return the state of the step for a training state, the same on every process."""
        return {"skipped_updates": self.skipped_updates}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the result of ``state_dict()``. States of earlier versions and of other kinds may lack a key."""
        self.skipped_updates = state.get("skipped_updates", 0)


@dataclass(slots=True, eq=False, repr=False)
class RunSchedule:
    """The state of a run's learning rate schedule.

    Attributes:
        initial_options: options of the optimizer before any schedule, if the run has a schedule
        shift: by how many updates the schedule is ahead of ``progress.update``, after a resumption with more or fewer
            updates per epoch
        is_recreated: whether the schedule of a resumed run is recreated rather than restored
    """

    initial_options: Options = field(default_factory=list)
    shift: int = 0
    is_recreated: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """The state of a run. A trainer always has one, ``trainer.run``: the active run, the last one, or an idle one.

    Callbacks may read the attributes that are listed here. They may add to ``cleanup``, ``end.last_calls`` and
    ``step_metrics``, but must not change the others. All other attributes belong to the trainer, and may change with
    any version.

    Attributes:
        ranks: the processes of the job, for settings, files and errors. In tensor parallelism, several processes
            compute a batch together: then ``data.ranks``, for sums and means over samples and gradients, has fewer
        control: requests to stop or pause the run, agreed on by all processes
        window: the accumulation window, and how much of it is filled
        request: the settings requested for the run
        data: the data and their loaders
        device: the device of this process
        overridden: names of the methods of a trainer that the user overrides, in a class or in the object
        kind: ``"training"``, also in the run's own evaluations; ``"evaluation"``, by ``evaluate``; or ``"prediction"``.
            ``request.kind`` is the kind of the outermost run
        config: the settings resolved from the request and the data; ``None`` before that
        training_step: how the run trains on a batch
        schedule: the state of the learning rate schedule
        end: how the run ends
        outer: the run within which this one was started, if any
        accumulation: the number of batches in an update
        cleanup: an exit stack, closed when the run ends, that frees the paths the run writes to, and restores temporary
            settings
        goodput: how the time of the job is spent
        progress: the current epoch, update, step and so on
        epoch_phase: how far the epoch has got; ``epoch_is_trained`` if its steps are done
        batch: the batch being processed; ``None`` outside a step
        batch_number: the number, in the epoch or evaluation, of the batch being read or processed, if any
        loss_trackers: the running losses of the epoch or evaluation
        unrecorded_losses: the running losses of the training epoch, until they are recorded
        recorded_losses: the mean losses of the last epoch or evaluation, by metric name
        step_metrics: values measured in the latest update, by name: numbers, or tensors on the device
        evaluation_interval: the interval between the evaluations of a training run that has data for them
        completes_evaluation: whether the dataset being evaluated is the last one of the evaluation after an epoch
        trained_model: the trainer's model, while another model is evaluated in its place
        skipped: the failed batches of the run's evaluations or its prediction; ``None`` if such a failure is an error
        resumed: the training state from which the run resumes, until all of it is restored; ``None`` in other runs
        latest: records of the latest training, evaluation and loading of weights, which outlive their runs
    """

    ranks: Ranks
    control: StopCoordinator
    window: GradientWindow
    request: RunRequest
    data: RunData
    device: torch.device
    overridden: frozenset[str]
    kind: Phase = "training"
    config: TrainerRunConfig | None = None
    training_step: Step = field(default_factory=Step)
    schedule: RunSchedule = field(default_factory=RunSchedule)
    end: RunEnd = field(default_factory=RunEnd)
    outer: Run | None = None
    accumulation: Accumulation = field(default_factory=partial(Accumulation, 1))
    cleanup: ExitStack = field(default_factory=ExitStack)
    goodput: Goodput = field(default_factory=Goodput)
    progress: Progress = field(default_factory=Progress)
    epoch_phase: EpochPhase = EpochPhase.TRAINING
    batch: Batch | None = None
    batch_number: int | None = None
    loss_trackers: LossTrackers = field(default_factory=LossTrackers)
    unrecorded_losses: LossTrackers | None = None
    recorded_losses: dict[str, float] = field(default_factory=dict)
    step_metrics: dict[str, MetricValue] = field(default_factory=dict)
    evaluation_interval: Interval | None = None
    completes_evaluation: bool = False
    trained_model: nn.Module | None = None
    skipped: SkippedBatches | None = None
    resumed: TrainingState | None = None
    latest: LatestRecords = field(default_factory=LatestRecords)

    # For the trainer only.
    ended_training_run: Run | None = None  # the training before this evaluation or prediction
    counts_before_evaluation: dict[str, int] | None = None  # numbers of values, by metric, within an evaluation
    counts_before_interruption: dict[str, int] = field(default_factory=dict)  # of metrics that are to be recorded again
    previous: Run | None = None  # the run that is current again when this one ends
    recorded_settings: StateDict | None = None  # recorded in training states; on the main process, if it saves states
    loop: LoopState = field(default_factory=LoopState)  # what only the loop needs to know
    # What keeps users' attributes in training states.
    user_attributes: UserAttributes = field(default_factory=lambda: (USER_ATTRIBUTES.content or UserAttributes)())
    trainability: dict[str, dict[str, int]] = field(default_factory=dict)  # of parameters, after the starting events
    left_trainability: dict[str, dict[str, int]] = field(default_factory=dict)  # the same, at the end
    holders: dict[frozenset[int], dict[int, nn.Module]] = field(default_factory=dict)  # of parameters, by ids
    inference_step: InferenceStep | None = None  # how batches without training are computed, if they may fail
    sharding: Sharding | None = None  # what a training run does differently, as its model is or will be sharded

    @classmethod
    def create(
        cls,
        trainer: TrainerLike,
        request: RunRequest,
        train_data: DataArguments | None = None,
        eval_data: DataArguments | None = None,
        ranks: Ranks | None = None,
    ) -> Run:
        """Create a run that has not started yet. A dict of training datasets is combined into one.

        Args:
            train_data: what is trained on; ``None`` for nothing
            eval_data: what is evaluated on, if anything
            ranks: the processes, for the first run of a trainer; later runs take them from the run before
        """
        ranks = ranks or trainer.current_run.ranks
        train, evaluated = train_data or DataArguments(), eval_data or DataArguments()
        dataset = as_one_dataset(train.dataset)
        return cls(
            ranks=ranks,
            control=StopCoordinator(ranks),
            window=GradientWindow(ranks, torch.device("cpu"), steps=1, batch_size=1),
            request=request,
            data=RunData(
                ranks, dataset, evaluated.dataset, train.collate_fn, train_arguments=train, eval_arguments=evaluated
            ),
            device=trainer.device,
            overridden=overridden_methods(trainer),
        )

    def __repr__(self) -> str:
        return f"Run({self.kind}, {self.progress})"

    def derive(self) -> Run:
        """Create an evaluation or prediction run within this one, with its own batches and losses."""
        return replace(
            self,
            data=replace(self.data, made_loaders=TransientSet()),
            schedule=replace(self.schedule, initial_options=[]),
            end=replace(self.end, last_calls=[]),
            loop=replace(self.loop),
            latest=replace(self.latest),
            batch=None,
            batch_number=None,
            loss_trackers=LossTrackers(),
            unrecorded_losses=None,
            recorded_losses={},
            skipped=None if self.skipped is None else SkippedBatches(self.skipped.phase),
        )

    def derive_after(self) -> Run:
        """Create an evaluation or prediction run after this one, which has ended.

        It keeps the progress and the records of the training, but not its training data, its requests to stop, nor why
        it ended.
        """
        run = self.derive()
        run.data.train_loader = run.data.train_loader_kwargs = None
        run.control = StopCoordinator(self.ranks)
        run.end = RunEnd(has_reached_limit=run.end.has_reached_limit)
        run.ended_training_run = self.ended_training_run or self
        return run

    @property
    def training_run(self) -> Run:
        """The training that this run is, is within, or comes after, of which a training state holds the state."""
        outermost = self
        while outermost.outer is not None:
            outermost = outermost.outer
        return outermost.ended_training_run or outermost

    @property
    def required_config(self) -> TrainerRunConfig:
        """The config of the run.

        Raises:
            RuntimeError: if there is no config yet
        """
        if self.config is None:
            raise RuntimeError("There is no run_config before train() or evaluate() has been called.")
        return self.config

    @property
    def passing_metrics(self) -> Collection[str]:
        """The metrics whose values ``evaluate()`` within a run only returns, because that run records them itself."""
        return () if self.outer is None else self.outer.request.metrics.evaluated

    @property
    def _num_epochs(self) -> int | None:
        """The number of epochs of the run; ``None`` if it is unknown, or before there is a config."""
        return None if self.config is None else self.config.num_epochs

    @property
    def epoch_is_trained(self) -> bool:
        """Whether the steps of the current epoch are done."""
        return self.epoch_phase > EpochPhase.TRAINING

    @property
    def evaluates_within_epochs(self) -> bool:
        """Whether the run also evaluates within epochs."""
        return self.evaluation_interval is not None and self.evaluation_interval.is_within_epochs

    @property
    def clock(self) -> float:
        """Seconds since the start of the run, the same on every process (as of their last synchronisation)."""
        return self.control.clock

    @property
    def is_finished(self) -> bool:
        """Whether all requested epochs or updates are complete."""
        limit, num_epochs = self.request.max_num_train_steps, self._num_epochs
        counts_updates = self.progress.update > 0  # an overridden _run_train_epoch need not count updates
        if limit is not None and (counts_updates or num_epochs is None or self.end.has_reached_limit):
            # The number of epochs is an estimate, because batches may be skipped.
            return self.progress.update >= limit or self.end.has_reached_limit
        return num_epochs is not None and self.progress.epochs_completed >= num_epochs

    @property
    def ends_with_epoch(self) -> bool:
        """Whether the current epoch is the last one, as far as that is known."""
        no_limit = self.request.max_num_train_steps is None
        return self.is_finished or (no_limit and self.progress.epoch == self._num_epochs)

    @property
    def has_made_last_update(self) -> bool:
        """Whether no update is left, as far as that is known. An evaluation and other events may be to come."""
        epoch_has_updates = not self.epoch_is_trained and not (self.batch is not None and self.batch.is_last)
        return self.is_finished or (self.ends_with_epoch and not epoch_has_updates)

    @property
    def max_num_samples(self) -> int | None:
        """The number of samples in all epochs of the run, which may end within the last epoch; ``None`` if unknown."""
        samples, num_epochs = self.data.required_train_loader.num_samples_read, self._num_epochs
        return None if samples is None or num_epochs is None else samples * num_epochs

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the current epoch is followed by an evaluation."""
        if self.evaluation_interval is None or not self.data.all_eval_loaders:
            return False
        return self.ends_with_epoch or self.evaluation_interval.is_due(self, ends_epoch=True)

    @property
    def trained_fraction(self) -> Fraction | None:
        """The trained fraction of the current epoch, less than 1 until it ends; ``None`` if unknown.

        It is computed from samples if their number is known, so that it is the same on any number of processes.
        """
        loader, progress = self.data.required_train_loader, self.progress
        total, left = loader.steps_left(0), loader.steps_left(progress.samples_in_epoch, progress.step)
        done = progress.step if total is None or left is None else total - left
        length = find_length(loader)
        return None if not length else Fraction(min(done, length - 1), length)

    @property
    def batch_indices(self) -> list[Index] | None:
        """The indices of the samples in this process's current batch, if known: see ``Trainer.batch_indices``."""
        indices = None if self.batch is None else self.batch.indices
        return indices.tolist() if isinstance(indices, torch.Tensor) else None if indices is None else list(indices)

    def count_step(self, output: BatchOutput, batch: Batch) -> tuple[int, int]:
        """Add the losses of a training batch to the running losses, and its samples to the progress.

        Returns:
            the number of samples of this process, and of all processes, in the step
        """
        # Inlines Batch.samples() and Progress.add_samples().
        local = batch.num_samples
        progress = self.progress
        if local != 0:  # 0 for a filler batch
            self.loss_trackers.add(output)
        local = int(output["batch_size"]) if local is None else local
        total = local if batch.total_samples is None else batch.total_samples
        progress.samples_in_epoch += total
        progress.samples += total
        return local, total

    def record_losses(self, history: RunHistory, name: str) -> None:
        """Record the mean losses over all processes under ``name``, formatted with the name of each loss."""
        means = self.loss_trackers.means(self.data.ranks, name)
        history.record_means(means, name)
        self.recorded_losses = means

    def counts_to_resume_from(self, history: RunHistory) -> dict[str, int]:
        """Return how many values some metrics had before those that a run resumed from here records again.

        These are the values of an evaluation that is not complete, and the losses of an interrupted epoch.
        """
        before = self.counts_before_evaluation
        if before is None or self.epoch_phase == EpochPhase.EVALUATED:
            return self.counts_before_interruption
        return counts_before_growth(history, before) | self.counts_before_interruption

    def record_interrupted_epoch(self, history: RunHistory) -> None:
        """Record the mean losses of an epoch that was not completed. Call it on every process."""
        losses = self.unrecorded_losses
        self.unrecorded_losses = None
        self.counts_before_interruption = self.counts_to_resume_from(history)
        self.counts_before_evaluation = None
        if losses is None or not self.progress.is_mid_epoch:
            return
        if any(weight for _, weight in losses.summed(self.data.ranks).values()):
            name = "train_{}_epoch"
            means = losses.means(self.data.ranks, name)
            self.counts_before_interruption |= {metric: len(history.get_metric_values(metric)) for metric in means}
            history.record_means(means, name)


class TrainerLike(Protocol):
    """A trainer, as callbacks, steps and tools see it. ``Trainer`` documents the attributes.

    Its optimizer and its scheduler may be of any library.
    """

    saves_attributes: ClassVar[bool]
    unsaved_attributes: ClassVar[Collection[str]]
    recomputes_gradients: ClassVar[bool | None]
    model: nn.Module
    loss_func: LossFunction | None
    optimizer: TrainerOptimizer
    scheduler: TrainerScheduler
    create_scheduler_fn: SchedulerFactory | None
    accelerator: Accelerator
    callback_handler: CallbackHandler
    run_history: RunHistory
    seed: int | None
    compile_model: bool | Literal["blocks"] | dict[str, Any]
    activation_checkpointing: ChosenModules
    channels_last: bool
    check_replicas: bool
    deterministic: bool | None
    division: Division
    compiled_forward: CompiledForwardLike | None
    registered_objects: dict[str, HasStateDict]
    prepared_model: PreparedModel | None
    open_runs: list[Run]

    # The current or last run.
    current_run: Run  # the attribute behind ``run``, which the package reads in every step

    @property
    def run(self) -> Run: ...
    @property
    def run_config(self) -> TrainerRunConfig | None: ...
    @property
    def step_metrics(self) -> dict[str, MetricValue]: ...
    @property
    def train_dataset(self) -> NamedData | None: ...
    @property
    def eval_dataset(self) -> NamedData | None: ...
    @property
    def train_dataloader(self) -> ShardedLoader | None: ...
    @property
    def eval_dataloader(self) -> ShardedLoader | None: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def data_ranks(self) -> Ranks: ...
    @property
    def eval_dataloaders(self) -> list[ShardedLoader]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def is_sharded(self) -> bool: ...
    @property
    def can_rewrap_model(self) -> bool: ...
    @property
    def update_was_skipped(self) -> bool: ...

    # Steps and parts of a run.
    def create_train_dataloader(
        self, batch_size: int, train_dl_kwargs: LoaderKwargs | None = None
    ) -> Iterable[BatchData]: ...
    def create_eval_dataloader(
        self, batch_size: int, eval_dl_kwargs: LoaderKwargs | None = None
    ) -> Iterable[BatchData]: ...
    def create_scheduler(self) -> TrainerScheduler: ...
    def parallelize_model(self, mesh: DeviceMesh) -> str | os.PathLike[str] | None: ...
    def training_run_start(self) -> None: ...
    def train_epoch_start(self) -> None: ...
    def calculate_train_batch_loss(self, batch: BatchData) -> BatchOutput: ...
    def train_step(self, batch: BatchData) -> BatchOutput | None: ...
    def backward_step(self, loss: torch.Tensor) -> None: ...
    def clip_gradients(self) -> None: ...
    def optimizer_step(self) -> None: ...
    def scheduler_step(self) -> None: ...
    def advance_scheduler(self, num_updates: int) -> None: ...
    def optimizer_zero_grad(self) -> None: ...
    def train_epoch_end(self) -> None: ...
    def eval_epoch_start(self) -> None: ...
    def calculate_eval_batch_loss(self, batch: BatchData) -> BatchOutput: ...
    def eval_epoch_end(self) -> None: ...
    def training_run_epoch_end(self) -> None: ...
    def training_run_end(self) -> None: ...
    def evaluation_run_start(self) -> None: ...
    def evaluation_run_end(self) -> None: ...
    def calculate_predict_batch_output(self, batch: BatchData) -> Tree: ...
    def _create_run_config(self, per_device_batch_size: int, **settings: object) -> TrainerRunConfig: ...
    def _create_step(self, run: Run) -> Step: ...
    def _step_after_epoch(self) -> None: ...
    def _check_scheduler(self, request: RunRequest) -> None: ...
    def _run_training(self) -> None: ...
    def _run_train_epoch(self, train_dl: Iterable[BatchData]) -> bool: ...
    def _run_eval_epoch(
        self, valid_dl: Iterable[BatchData], is_training: bool = True, is_intermediate: bool = False
    ) -> None: ...

    # What steps and callbacks may call.
    def call_event(self, event: str, **kwargs: object) -> None: ...
    def print(self, *args: object, **kwargs: Any) -> None: ...
    def get_model(self, keep_torch_compile: bool = True) -> nn.Module: ...
    def rewrap_model(self) -> None: ...
    def skip_update(self) -> None: ...
    def compare_replicas(self) -> None: ...
    def log(self, name: str, value: torch.Tensor | float, weight: Count | None = None) -> None: ...
    def gather(self, tensor: Tree, padding_value: float | None = None, *, with_gradients: bool = False) -> Tree: ...
    def barrier(self) -> None: ...
    def broadcast_object(self, obj: T) -> T: ...
    def all_gather_object(self, obj: T) -> list[T]: ...
    def sync_buffers(self, module: nn.Module) -> None: ...
    def train(self, train_dataset: NamedData, *args: Any, **kwargs: Any) -> None: ...
    def evaluate(self, dataset: NamedData | None = None) -> dict[str, MetricValue]: ...
    def run_evaluation(self, *args: Any, **options: Any) -> dict[str, float]: ...
    def predict_iter(self, dataset: Data) -> Iterator[Tree]: ...
    def save_checkpoint(self, save_path: PathOrFile, *args: Any, **options: Any) -> None: ...
    def load_checkpoint(self, checkpoint_path: PathOrFile, *args: Any, **options: Any) -> StateDict: ...
    def check_weights(self) -> None: ...
    def save_training_state(self, output_dir: StrPath, *args: Any, **options: Any) -> None: ...
    def load_training_state(self, input_dir: StrPath) -> StateDict: ...
    def close(self) -> None: ...


# What extensions fill, with interfaces that take the trainer and its run, or that a trainer has.


class CompiledForwardLike(Protocol):
    """A compiled ``calculate_train_batch_loss``.

    Attributes:
        logged: the values logged during compilation: name, value and weight of each
    """

    logged: list[tuple[str, torch.Tensor | float, Count | None]]

    def disable(self, reason: str) -> None:
        """Compute all further batches without compilation, and warn once of the reason."""

    def __call__(self, batch: BatchData) -> BatchOutput:
        """Return the output of the trainer's method."""

    def outputs_and_loss(
        self, model: nn.Module, loss_func: LossFunction | None, batch: BatchData, read: Batch | None
    ) -> BatchOutput:
        """Return the output of the trainer's ``BatchAdapter``, as far as it may be traced."""


class InferenceStep(Protocol):
    """How a run computes a batch of its evaluations, or of its prediction, if batches may fail."""

    def compute(self, trainer: TrainerLike, run: Run, batch: Batch, compute: Callable[[Batch], Tree]) -> Tree:
        """Return the output of a batch, or ``SKIPPED`` if it has failed and is skipped.

        Args:
            compute: returns the output of a batch, or of a part of it
        """

    def report(self, trainer: TrainerLike, run: Run) -> None:
        """Report what was skipped. Called on every process after its last batch."""


class Sharding(Protocol):
    """What runs of models with sharded weights do differently. Every process calls each method."""

    def begin_run(self, trainer: TrainerLike, run: Run) -> None:
        """Shard the model, if that is left to the trainer, and decide which processes read which data.

        Called when a run has become the current one, before it reads its data.
        """

    def prepare_training(self, trainer: TrainerLike, run: Run) -> None:
        """Called in a training run before its model and its optimizer are prepared."""

    def choose_step(self, trainer: TrainerLike, run: Run) -> Callable[[TrainerLike, Run], Step]:
        """Return the kind of step of a training run for which no feature asks for another one."""


#: What shards models, and trains those that are sharded.
SHARDING: Slot[Sharding] = Slot("sharding")


class UserAttributes:
    """What users hold in attributes of trainers, callbacks and modules, in the training states of a run.

    This class keeps none of them. An extension fills ``USER_ATTRIBUTES`` with a subclass that does.

    Attributes:
        compared: arguments of callbacks, by callback and name, whose differences have been reported
    """

    def __init__(self) -> None:
        self.compared: set[tuple[str, str]] = set()

    def note_created(self, trainer: TrainerLike) -> None:
        """Note what the program has created, before a run that may save or resume changes it."""

    def note_modules(self, trainer: TrainerLike) -> None:
        """Note the attributes of the model and other modules before any run, as it may save without having said so."""

    def note_left(self, trainer: TrainerLike) -> None:
        """Note at the end of a run what it leaves, for ``undo()``."""

    def undo(self, trainer: TrainerLike) -> None:
        """Undo what the run has changed, before another one of its trainer resumes; what is not as left stays."""

    def capture(self, trainer: TrainerLike) -> tuple[StateDict, StateDict]:
        """Return the states of the attributes: those of all processes, and those of this process. A collective."""
        return {}, {}

    def restore(
        self, trainer: TrainerLike, saved: StateDict, own: StateDict | None, source: str, *, is_final: bool
    ) -> None:
        """Restore the results of ``capture()``.

        Args:
            own: the states of this process; ``None`` if another number of processes saved them
            source: the directory or the URL of the training state, for messages
            is_final: whether no more attributes will be created, so that missing ones are reported

        Raises:
            ValueError: if there are such states, but the extension is missing
        """
        if trainer.saves_attributes and (names := self.names_in(saved)):
            paths = listed(sorted(f"{owner}.{name}".lstrip(".") for owner, name in names), 10)
            raise ValueError(f"Restoring {paths} from {source!r} {missing_extension_text(USER_ATTRIBUTES.extension)}")

    @staticmethod
    def names_in(saved: StateDict) -> set[tuple[str, str]]:
        """Return the names of owners and of their attributes whose values are in a state."""
        return {(owner, name) for part in ("kept", "own") for owner, of in saved.get(part, {}).items() for name in of}

    def describe_unsaved(self, trainer: TrainerLike) -> str:
        """Return a description of what states cannot hold; an empty text if they hold everything."""
        return ""

    def changed_modules(self, trainer: TrainerLike) -> dict[str, nn.Module]:
        """Return the modules in attributes of the trainer that no optimizer trains, but that the run has changed."""
        return {}


#: What keeps the users' attributes of a run in its training states.
USER_ATTRIBUTES: Slot[type[UserAttributes]] = Slot("user_attributes")
