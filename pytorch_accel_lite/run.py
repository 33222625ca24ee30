"""Runs: the state of one call of ``train``, ``evaluate`` or ``predict``, and how runs begin, nest and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import nn

from pytorch_accel_lite.attributes import set_optimizer_modes
from pytorch_accel_lite.batches import BatchOutput
from pytorch_accel_lite.checks.arguments import check_same_call
from pytorch_accel_lite.checks.losses import watch_first_call
from pytorch_accel_lite.data import Batch, ShardedLoader, shard
from pytorch_accel_lite.distributed import Ranks, launch, shutdown
from pytorch_accel_lite.distributed.collectives import gathering_uneven_batches
from pytorch_accel_lite.distributed.prepared import PreparedModel
from pytorch_accel_lite.distributed.stopping import StopCoordinator
from pytorch_accel_lite.events import NonFiniteLossError, RunPausedError, StopTrainingError
from pytorch_accel_lite.gradients import GradientWindow
from pytorch_accel_lite.history import RunHistory
from pytorch_accel_lite.rates import Options, learning_rates, note_initial_options
from pytorch_accel_lite.run_config import RunRequest, TrainerRunConfig
from pytorch_accel_lite.tracking import LossTrackers, Progress
from pytorch_accel_lite.utils import is_overridden

if TYPE_CHECKING:
    from pytorch_accel_lite.checkpoint.training_state import TrainingState
    from pytorch_accel_lite.schemes.closures import WindowReplay
    from pytorch_accel_lite.schemes.own_step import OwnStep
    from pytorch_accel_lite.trainer import Trainer


#: What is over of an epoch whose steps are: its training, its evaluation, all but the final checkpoint.
TRAINED, EVALUATED, ENDED = 1, 2, 3


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """The state of a run. A trainer always has one: the active run, the last one, or an idle one.

    :ivar data_ranks: the processes as the data are divided among them: some share each batch in tensor parallelism
    :ivar before: the run that is restored when this one ends
    :ivar outer: the run within which this one was started, if any
    :ivar request: the settings requested for the run
    :ivar config: the settings resolved from the request and the data
    :ivar stopped_by: the callback that stopped the run, as the call that created it
    :ivar epoch_phase: ``TRAINED``, ``EVALUATED`` or ``ENDED`` once that much of the epoch is over; 0 during its steps
    :ivar first_epoch: what the ``set_epoch`` of samplers and datasets is given in the first epoch; 1 in runs resumed
        from states of version 0.2 and earlier
    :ivar eval_loader: the loader being read, one of ``eval_loaders`` unless that is empty: a single one has no name
    :ivar eval_dataset_name: name of the dataset being evaluated, if there are several
    :ivar made_loaders: loaders created for this run, whose workers end with it
    :ivar batch: the batch being processed; ``None`` outside a step
    :ivar has_fillers: whether a process without samples in a step takes part in it, with a filler batch
    :ivar loss_trackers: the running losses of the epoch or evaluation
    :ivar recorded_losses: the mean losses of the last epoch or evaluation
    :ivar special_step: runs a step that may fail, or the user's own; ``None`` for the usual step
    :ivar own_step: runs a step if the trainer's ``train_step`` is overridden
    :ivar replay: recomputes the gradients of an update, where that may be needed
    :ivar closure: argument of the optimizer's ``step``: nothing, or a function that recomputes the gradients
    :ivar trained_model: the trainer's model, while another one is evaluated in its place
    :ivar must_examine_batch: whether the first batch is yet to be checked for a loss that is not what it is taken for
    :ivar averaged_here: parameters whose gradients ``DistributedDataParallel`` does not average
    :ivar synced_buffers: buffers that it does not synchronise, of the loss function and attributes, by module and name
    :ivar resumed: the training state that is still being restored
    :ivar set_apart: which values of each metric ``evaluate`` has recorded within the run, as indices
    :ivar unrecorded: the running losses of the training epoch, until they are recorded
    :ivar last_words: called when the run has ended without an error, after all callbacks have handled its end
    :ivar initial_options: options of the optimizer before any schedule, if the run has a schedule
    :ivar rates_left: the learning rates at the end of a run with a schedule
    :ivar recreates_schedule: whether the schedule of a resumed run is recreated rather than restored
    :ivar schedule_shift: updates by which the schedule is ahead of ``progress.update``, if epochs had more or fewer
    """

    control: StopCoordinator
    data_ranks: Ranks
    window: GradientWindow
    request: RunRequest
    train_dataset: Any
    eval_dataset: Any
    collate_fn: Any
    before: Run | None = None
    outer: Run | None = None
    config: TrainerRunConfig | None = None
    stop_reason: str | None = None
    stopped_by: str | None = None
    interruption: RunPausedError | None = None
    data_seed: int | None = None
    first_epoch: int = 0
    train_loader: Any = None
    train_loader_kwargs: dict[str, Any] | None = None
    eval_loader: Any = None
    eval_dataset_name: str | None = None
    eval_loaders: dict[str, Any] = field(default_factory=dict)
    eval_loader_kwargs: dict[str, Any] | None = None
    made_loaders: WeakSet[ShardedLoader] = field(default_factory=WeakSet)
    progress: Progress = field(default_factory=Progress)
    epoch_phase: int = 0
    own_step: OwnStep | None = None
    replay: WindowReplay | None = None
    closure: tuple[Callable[[], torch.Tensor]] | tuple[()] = ()
    special_step: Callable[[Trainer, Run, Batch], BatchOutput | None] | None = None
    num_microbatches: int = 1
    must_examine_batch: bool = False
    must_warm_up_ddp: bool = False
    must_compare_replicas: bool = False
    averaged_here: list[nn.Parameter] = field(default_factory=list)
    synced_buffers: list[tuple[nn.Module, str]] = field(default_factory=list)
    trained_model: nn.Module | None = None
    resumed: TrainingState | None = None
    batch: Batch | None = None
    has_fillers: bool = True
    loss_trackers: LossTrackers = field(default_factory=LossTrackers)
    recorded_losses: dict[str, float] = field(default_factory=dict)
    step_metrics: dict[str, Any] = field(default_factory=dict)
    gradient_norm: torch.Tensor | None = None
    skips_update: bool = False
    skipped_updates: int = 0
    is_sanity_evaluation: bool = False
    set_apart: dict[str, set[int]] = field(default_factory=dict)
    unrecorded: LossTrackers | None = None
    last_words: list[Callable[[], None]] = field(default_factory=list)
    initial_options: Options = field(default_factory=list)
    rates_left: list[Any] = field(default_factory=list)
    schedule_shift: int = 0
    recreates_schedule: bool = False

    @classmethod
    def create(
        cls, ranks: Ranks, request: RunRequest, train_data: Any = None, eval_data: Any = None, collate_fn: Any = None
    ) -> Run:
        """Create a run that has not started yet. A dict of training datasets is combined into one."""
        if isinstance(train_data, dict):
            from pytorch_accel_lite.data.named import NamedDatasets

            train_data = NamedDatasets(train_data)
        window = GradientWindow(ranks, torch.device("cpu"), steps=1, batch_size=1)
        return cls(StopCoordinator(ranks), ranks, window, request, train_data, eval_data, collate_fn)

    def __repr__(self) -> str:
        return f"Run({self.request.kind}, {self.progress})"

    def derive(self) -> Run:
        """Create an evaluation or prediction run within or after this one, with its own batches and losses."""
        return replace(
            self,
            batch=None,
            loss_trackers=LossTrackers(),
            recorded_losses={},
            made_loaders=WeakSet(),
            unrecorded=None,
            last_words=[],
            initial_options=[],
        )

    @property
    def required_config(self) -> TrainerRunConfig:
        """The config of the run.

        :raises RuntimeError: if there is none yet
        """
        if self.config is None:
            raise RuntimeError("There is no run_config before train() or evaluate() has been called.")
        return self.config

    @property
    def all_eval_loaders(self) -> list[Any]:
        """The loaders of this process's evaluation batches, for all datasets."""
        return list(self.eval_loaders.values()) or [loader for loader in [self.eval_loader] if loader is not None]

    @property
    def clock(self) -> float:
        """Seconds since the start of the run, the same on every process (as of their last synchronisation)."""
        return self.control.clock

    @property
    def is_finished(self) -> bool:
        """Whether all requested epochs or updates are complete."""
        limit = self.request.max_num_train_steps
        if limit is not None:  # the number of epochs is an estimate, as batches may be skipped
            return self.progress.update >= limit
        num_epochs = self.required_config.num_epochs
        return num_epochs is not None and self.progress.epochs_completed >= num_epochs

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the current epoch is followed by an evaluation."""
        epoch, every = self.progress.epoch, self.request.eval_every_n_epochs
        if every is None or not self.all_eval_loaders:
            return False
        no_limit = self.request.max_num_train_steps is None
        is_last = self.is_finished or (no_limit and epoch == self.required_config.num_epochs)
        return is_last or epoch % every == 0

    @property
    def batch_indices(self) -> list[Any] | None:
        """The indices in the dataset of the samples in this process's current batch, for use in callbacks and steps.

        ``None`` if unknown, as for streams and for loaders other than a ``DataLoader``. Empty for a filler batch, which
        only keeps this process in step with the others and has no weight.
        """
        indices = None if self.batch is None else self.batch.indices
        return indices.tolist() if isinstance(indices, torch.Tensor) else None if indices is None else list(indices)

    @property
    def train_dataset_name(self) -> str | None:
        """Name of the dataset that the current training batch is from; ``None`` unless a mixture has such batches."""
        return None if self.batch is None else self.batch.dataset_name

    def track_step(self, output: BatchOutput, batch: Batch) -> tuple[int, int]:
        """Track the losses of a training batch; return its number of samples on this process and on all processes."""
        # Inlines Batch.samples() and Progress.add_samples(), as this runs in every step.
        own = batch.num_samples
        progress = self.progress
        if own != 0:  # 0 for a filler batch
            self.loss_trackers.add(output)
        own = int(output["batch_size"]) if own is None else own
        total = own if batch.total_samples is None else batch.total_samples
        progress.samples_in_epoch += total
        progress.samples += total
        return own, total

    def record_losses(self, history: RunHistory, ranks: Ranks, name: str) -> None:
        """Record the mean losses over all ranks under ``name``, formatted with the name of each loss."""
        means = self.loss_trackers.means(ranks, name)
        for metric, value in means.items():
            history.update_metric(metric, value)
        self.recorded_losses = means

    def record_interrupted_epoch(self, history: RunHistory, ranks: Ranks) -> None:
        """Record the mean losses of an epoch that was not completed. Call it on every process."""
        losses = self.unrecorded
        self.unrecorded = None
        if losses is None or not self.progress.is_mid_epoch:
            return
        if any(weight for _, weight in losses.summed(ranks).values()):
            for metric, value in losses.means(ranks, "train_{}_epoch").items():
                history.update_metric(metric, value)


def create_loader(trainer: Trainer, run: Run, source: Any, training: bool) -> ShardedLoader:
    """Return a loader that gives this process its share of a source of batches, with the options of the run."""
    accelerate = trainer.accelerator.dataloader_config
    loader = shard(
        source,
        run.data_ranks,
        trainer.device,
        run.data_seed,
        training or trainer.is_sharded,
        limit=run.request.max_batches,
        channels_last=trainer.channels_last,
        shares=None if trainer.logical is None else trainer.logical.shares,
        yields_failures=run.request.skips_failed_batches if training else run.request.on_failed_batch is not None,
        divides=training,
        first_epoch=run.first_epoch,
        split_batches=accelerate.split_batches,
        dispatch_batches=accelerate.dispatch_batches,
    )
    if loader is not source:
        run.made_loaders.add(loader)
        data = "training" if training else "evaluation"
        if loader.shared_by:
            trainer.print(f"Each process reads its own part of the {data} data, as sharded by {loader.shared_by}.")
        elif loader.undivided:
            trainer.print(
                f"Each process reads all {data} batches of its own {loader.undivided}: they are not divided among the "
                "processes. If all have the same batches, keep a part on each, such as "
                "batches[trainer.ranks.rank::trainer.ranks.world_size], or use a Dataset. If each has its own, return "
                "OwnShard(batches), which says so."
            )
    return loader


def create_config(trainer: Trainer, run: Run, batch_size: int) -> TrainerRunConfig:
    """Return the settings of a run, from the method that users of pytorch-accelerated override, with its arguments."""
    names = ("num_epochs", "gradient_accumulation_steps", "max_num_train_steps", "gradient_clip_value")
    asked = {name: getattr(run.request, name) for name in names}
    return trainer._create_run_config(per_device_batch_size=batch_size, **asked)


@contextmanager
def entering(trainer: Trainer, run: Run, call: str) -> Iterator[None]:
    """Make a run the trainer's current one, and restore the previous run afterwards.

    A run that has started sets its ``before`` to ``None``, and stays as the latest one.

    :param call: the method that begins the run, which every process must call
    """
    run.before = trainer.current_run
    run.outer = trainer.current_run if trainer.current_run in trainer.open_runs else None
    trainer.open_runs.append(run)
    trainer.current_run = run
    try:
        with computing(trainer), gathering_uneven_batches(trainer):
            datasets = {"train_dataset": run.train_dataset, "eval_dataset": run.eval_dataset}
            check_same_call(trainer.ranks, call, datasets, trainer.callback_handler.callback_list, trainer.seed)
            launch.begin_sharded(trainer, run)
            yield
        shutdown.note_end(failed=False)
    except BaseException as error:
        shutdown.note_end(failed=not isinstance(error, GeneratorExit))  # the caller has stopped iterating
        raise
    finally:
        if trainer.current_run is run and run.before is not None:
            trainer.current_run = run.before
        run.before = None
        run.resumed = None
        if run.initial_options:
            note_initial_options(trainer.optimizer, run.initial_options)
            run.rates_left = learning_rates(trainer.optimizer)
        # This also ends predictions that were started within it and not iterated to their end.
        trainer.open_runs[:] = [other for other in trainer.open_runs if other is not run and other.outer is not run]
        run.outer = None
        if not trainer.open_runs:
            set_optimizer_modes(trainer, training=False)
            release_model(trainer)
        for loader in run.made_loaders:
            loader.stop_workers()


@contextmanager
def computing(trainer: Trainer) -> Iterator[None]:
    """Let the settings of torch that a trainer has asked for hold in a block."""
    with (
        nullcontext() if trainer.backend_settings is None else trainer.backend_settings.in_force(),
        nullcontext() if trainer.logical is None else trainer.logical.computing_alike(trainer),
    ):
        yield


def prepare_model(trainer: Trainer, training: bool) -> None:
    """Prepare the model and the optimizer with Accelerate, unless they are prepared already."""
    prepared = trainer.prepared_model
    is_same = prepared is not None and (trainer.model, trainer.optimizer) == (prepared.model, prepared.optimizer)
    if prepared is not None and (is_same or not prepared.outlives_runs):
        return
    if isinstance(trainer.loss_func, nn.Module):
        trainer.loss_func.to(trainer.device)
        watch_first_call(trainer.loss_func)
    apply_model_options(trainer)
    averages = is_overridden(trainer, "train_step") or trainer.logical is not None  # the step does so by itself
    prepared = PreparedModel(trainer.accelerator, trainer.model, trainer.optimizer, training and not averages)
    trainer.prepared_model = prepared
    trainer.model = prepared.model
    if training or prepared.outlives_runs:
        prepared.make_optimizer(trainer.accelerator)
    trainer.optimizer = prepared.optimizer


def apply_model_options(trainer: Trainer) -> None:
    """Change the memory format of the model and compile it, in place and as requested, unless it is compiled."""
    model = trainer.get_model()
    if trainer.channels_last:
        model.to(memory_format=torch.channels_last)
    if trainer.compile_model is not False and model._compiled_call_impl is None:
        model.compile(**({} if trainer.compile_model is True else trainer.compile_model))


def release_model(trainer: Trainer) -> None:
    """Release the model and the optimizer, unless their weights exist only in prepared form."""
    prepared = trainer.prepared_model
    if prepared is not None and not prepared.outlives_runs:
        trainer.model, trainer.optimizer = prepared.release(trainer.model)
        trainer.prepared_model = None


@contextmanager
def ending(trainer: Trainer, run: Run, kind: Literal["training", "evaluation"]) -> Iterator[None]:
    """Fire the ending events after a block. If it is stopped early, print the reason and notify the callbacks.

    The reason is printed after the metrics of the epoch, which callbacks then show; that of a pause is printed at once,
    as saving takes time. Stops and errors within an outer run are left to that run.
    """
    stopped = None
    ended = kind == "evaluation"  # errors do not fire its ending events
    try:
        try:
            yield
        except StopTrainingError as stop:
            stopped = stop
            if run.outer is None:
                run.stop_reason = str(stop) or type(stop).__name__
                run.stopped_by = stop.raised_by
                run.interruption = stop if isinstance(stop, RunPausedError) else None
                if run.interruption is not None:
                    trainer.print(run.stop_reason)
                _call_ending_event(trainer, run, "on_stop_training_error")
                if run.interruption is None:
                    trainer.print(run.stop_reason)
                run.record_interrupted_epoch(trainer.run_history, run.data_ranks)  # once a state has been saved
        ended = True
        if kind == "training":
            set_optimizer_modes(trainer, training=False)
        getattr(trainer, f"{kind}_run_end")()
        _call_ending_event(trainer, run, f"on_{kind}_run_end")
        for speak in run.last_words:
            speak()
    except BaseException as error:
        from pytorch_accel_lite.failed_runs import close_failed

        close_failed(trainer, run, error, ended)
        raise
    if stopped is not None and run.outer is not None:
        raise stopped


def _call_ending_event(trainer: Trainer, run: Run, event: str) -> None:
    """Fire an event while the run is ending, ignoring requests to stop it."""
    try:
        trainer.call_event(event)
        if trainer.ranks.world_size > 1:
            run.control.sync(now=True)
    except StopTrainingError as stop:
        run.stop_reason = run.stop_reason or str(stop)


def add_note(error: Exception, trainer: Trainer, run: Run, phase: str) -> None:
    """Add a note to the error of a step, with the place, the data and advice.

    :param phase: ``"training"``, ``"evaluation"`` or ``"prediction"``
    """
    if not isinstance(error, (StopTrainingError, NonFiniteLossError)):
        from pytorch_accel_lite.checks.explanations import explain  # needed only here

        explain(error, trainer, run, phase)
