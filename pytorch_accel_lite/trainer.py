"""The trainer: what users pass, call and override. For the work, read ``loop/fit.py``, then ``loop/training.py``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from pytorch_accel_lite import registered_extensions as registered_extensions  # fills the seams
from pytorch_accel_lite.base.arguments import LIBRARY_ATTRIBUTES, checked_calls
from pytorch_accel_lite.base.display import join_wrapped, short_repr
from pytorch_accel_lite.base.missing_extensions import add_missing_method_errors
from pytorch_accel_lite.base.modules import is_sharded, unwrap, without_gradients
from pytorch_accel_lite.base.paths import PathOrFile, StrPath
from pytorch_accel_lite.base.trainer_names import Shadowable, check_subclass, names_for_users, presented, reserved
from pytorch_accel_lite.base.types import ChosenModules, HasStateDict, StateDict, Tree
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.callbacks import (
    DEFAULT_CALLBACKS,
    LogMetricsCallback,
    MoveModulesToDeviceCallback,
    PrintProgressCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
)
from pytorch_accel_lite.callbacks.default_callbacks import ADDED_TO_EACH_TRAINER, METRICS
from pytorch_accel_lite.checkpoint import loading, saving
from pytorch_accel_lite.checkpoint.disk.background_writer import BackgroundWriter
from pytorch_accel_lite.data.batch_adapter import BatchAdapter, LossFunction
from pytorch_accel_lite.data.loader_base import ShardedLoader
from pytorch_accel_lite.data.loader_creation import (
    DEFAULT_BATCH_SIZE,
    LoaderKwargs,
    default_loader_kwargs,
    torch_loader,
)
from pytorch_accel_lite.data.outputs import total_loss
from pytorch_accel_lite.data.sources import (
    BatchData,
    BatchOutput,
    CollateFunction,
    Data,
    Index,
    NamedData,
    Source,
    dataset_of,
)
from pytorch_accel_lite.distributed import Ranks, launched_processes, shutdown
from pytorch_accel_lite.distributed.accelerator import create_accelerator, default_accelerator, find_unused_in_ddp
from pytorch_accel_lite.distributed.ranks import find_ranks
from pytorch_accel_lite.extensions.checking import program_check
from pytorch_accel_lite.extensions.closures import replaying_step
from pytorch_accel_lite.extensions.logical import logical_of_trainer
from pytorch_accel_lite.extensions.memory_estimate import estimate
from pytorch_accel_lite.extensions.model_summary import layer_summary
from pytorch_accel_lite.extensions.progress_bar import ProgressBarCallback
from pytorch_accel_lite.extensions.tuning import batch_size_finder, diagnosis, lr_finder
from pytorch_accel_lite.loop import (
    custom_loops,
    evaluation,
    loaders_and_lengths,
    model_setup,
    prediction,
    scheduling,
    training,
)
from pytorch_accel_lite.loop.fit import fit
from pytorch_accel_lite.loop.guards import arguments_and_datasets, same_on_all_ranks
from pytorch_accel_lite.loop.loaders_and_lengths import sharded_for_run
from pytorch_accel_lite.optimizers.optimizer_parts import (
    OptimizerFactory,
    Optimizers,
    SchedulerFactory,
    TrainerScheduler,
    is_created,
)
from pytorch_accel_lite.optimizers.optimizer_steps import clear_gradients, take_step
from pytorch_accel_lite.run.accumulation import Count
from pytorch_accel_lite.run.callback_handler import CallbackHandler
from pytorch_accel_lite.run.ending import RunPausedError
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.goodput import Goodput
from pytorch_accel_lite.run.history import InMemoryRunHistory, MetricValue, RunHistory
from pytorch_accel_lite.run.intervals import Interval, parse_interval
from pytorch_accel_lite.run.losses import LossTracker, LossTrackers
from pytorch_accel_lite.run.prepared_model import PreparedModel
from pytorch_accel_lite.run.progress import Progress
from pytorch_accel_lite.run.request_and_config import RunRequest, TrainerRunConfig
from pytorch_accel_lite.run.run import Run, Step
from pytorch_accel_lite.run.run_data import DataArguments
from pytorch_accel_lite.run.scheduler_steps import step_after_epoch
from pytorch_accel_lite.run.step_division import create_division
from pytorch_accel_lite.run.watched_metric import latest_metric
from pytorch_accel_lite.schedulers.placeholders import (
    PlaceholderError,
    TrainerPlaceholderValues,
    replace_trainer_placeholder_values,
)
from pytorch_accel_lite.schedulers.schedule_arguments import ScheduleArgument, resolve_names
from pytorch_accel_lite.steps import clipping, skipped_updates
from pytorch_accel_lite.steps.step_choice import create_step
from pytorch_accel_lite.trainer_methods import gather_and_broadcast, optimizer_factories, trainer_log

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

__all__ = [
    "DEFAULT_CALLBACKS",
    "LogMetricsCallback",
    "MoveModulesToDeviceCallback",
    "PlaceholderError",
    "PrintProgressCallback",
    "ProgressBarCallback",
    "RunHistory",
    "StopTrainingError",
    "TerminateOnNaNCallback",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "replace_trainer_placeholder_values",
]


#: Arguments of a trainer that become attributes. A subclass may have set them before.
_GIVEN = {"model", "loss_func", "optimizer", "run_history", "accelerator", "seed", "compile_model", "channels_last"}
_GIVEN |= {"activation_checkpointing", "check_replicas", "deterministic", "scheduler", "create_scheduler_fn"}
_SHOWN_FIRST = (
    *("train", "evaluate", "predict", "predict_iter", "save_model", "save_checkpoint", "load_checkpoint"),
    *("check", "find_lr", "find_batch_size", "diagnose", "estimate_memory", "summary", "log"),
)
#: Methods whose arguments are checked before they are called.
_CHECKED = (
    *("__init__", "train", "evaluate", "run_evaluation", "predict", "predict_iter"),
    *("find_lr", "find_batch_size", "check", "diagnose", "estimate_memory"),
    *("save_checkpoint", "load_checkpoint", "save_model", "save_training_state"),
)


def _run_for_assignment(trainer: Trainer, loader_of: Literal["train", "eval"] | None = None) -> Run:
    """Return the current run, for a program to set an attribute of it.

    Args:
        loader_of: for a dataloader, whether it trains or evaluates

    Raises:
        AttributeError: before the trainer is initialised; or, for a dataloader, while nothing is running, because the
            next run would replace the dataloader
    """
    if "current_run" not in vars(trainer):
        raise AttributeError(f"{type(trainer).__name__}: call super().__init__(...) before setting attributes.")
    if loader_of is not None and not trainer.open_runs:
        raise AttributeError(
            f"{type(trainer).__name__}.{loader_of}_dataloader is the loader of the current run, but nothing is "
            f"running. Store your own loader under another name, and return it from create_{loader_of}_dataloader()."
        )
    return trainer.current_run


def _warn_if_not_read(trainer: Trainer, name: str, dataset: Source, loader: Source) -> None:
    """Warn of a dataset that a program assigns within a run, if the run has created its loader, of other data."""
    read = dataset_of(getattr(loader, "source", loader))
    if trainer.open_runs and loader is not None and dataset is not read and trainer.ranks.rank == 0:
        warn_outside(
            f"trainer.{name} = ... has no effect on the run in progress, which reads trainer.{name[:-3]}loader. Assign "
            "a loader to that, or pass the dataset to the next run."
        )


@add_missing_method_errors
@checked_calls(*_CHECKED)
@presented(_SHOWN_FIRST)
class Trainer:
    """Trains and evaluates a model, and predicts with it, on any hardware that Accelerate supports.

    What you call:

    - ``train()``, ``evaluate()`` and ``predict()``; then ``progress`` and ``run_history`` have the results
    - before a run: ``check()``, ``find_lr()``, ``find_batch_size()``, ``diagnose()``, ``estimate_memory()``
    - to save and load: ``save_model()``, ``save_checkpoint()``, ``load_checkpoint()``

    Customise it with callbacks, or by overriding step methods such as ``calculate_train_batch_loss()``;
    ``TrainerCallback`` shows when each is called.

    Args:
        model: the model to train
        loss_func: called as ``loss_func(model_outputs, targets)``; returns a scalar that is a mean over the batch, or a
            dict of named scalars whose sum is minimised; ``None`` for models that return their own loss
        optimizer: an optimizer of the model's parameters, or a dict or list of optimizers that step together, each with
            some of them, available as ``trainer.optimizer["name"]``; or a factory such as ``partial(AdamW, lr=1e-3)``,
            called with the trainable parameters when a run first prepares the model; ``None`` to only evaluate or
            predict
        callbacks: callbacks, as instances or classes, called in this order; ``None`` is left out
        run_history: where metrics are recorded; by default an ``InMemoryRunHistory``
        accelerator: an ``accelerate.Accelerator``; by default one is created by ``_create_accelerator()``
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``; by default that of the launcher, or of an
            ``Accelerator`` that you have already created. Trainers of a process may differ.
        metrics: metrics to compute in each evaluation: a ``MetricsCallback`` with these is added before the other
            callbacks
        seed: makes each run a function of (code, data, seed): ``train`` seeds all generators, and the seed determines
            the order of the data; by default no generator is ever seeded
        compile_model: compile the model in place before its first run, with ``torch.compile``'s defaults or the
            arguments in a dict; the names in its state do not change. ``"blocks"`` compiles the model's repeated blocks
            one by one, which takes less time. A dict may have ``"blocks"``, too, see ``activation_checkpointing``.
        compile_step: compile the forward pass and the loss of training batches as one, and their backward pass, in the
            same way; a batch that cannot be compiled is computed as usual, with a warning that says why
        channels_last: store the model's weights, and all tensors with 4 dimensions in batches, in the channels-last
            memory format, which is faster for convolutions on many devices; shapes do not change
        check_replicas: with several processes, check after the first update and after each epoch that all hold the same
            weights; pass ``False`` if you average weights or gradients yourself, and not in every epoch
        find_unused_parameters: with several processes, let ``DistributedDataParallel`` look in each step for parameters
            that the loss does not depend on, which takes time; for models that use different parts in different steps
        logical_processes: number of processes for which the job is defined: with a ``seed``, the run gives the same
            bits on any number of real processes up to this. Everything counted per process is then per logical process.
        deterministic: use deterministic kernels in runs, which may be slower, and raise an error for operations without
            one; ``None`` leaves torch's setting unchanged. It is restored after a run.
        activation_checkpointing: recompute activations in the backward pass instead of keeping them, which saves memory
            and gives the same bits. ``True`` for all repeated blocks of the model, a fraction for a share of them, or
            names of modules (with ``*``), classes, or a function ``(name, module) -> bool``

    Attributes:
        scheduler: the scheduler of the run, or ``None``
        callback_handler: calls the callbacks; add another by ``callback_handler.add_callback``
        division: how the work of each step is divided among the processes, a ``Division``
        logical: with ``logical_processes``, the logical processes of this process, and the outputs of each in a step
        saves_attributes: whether checkpoints and training states include what is trained besides the model, and
            training states also all attributes of users that they can hold
        unsaved_attributes: names of attributes to leave out of both
        recomputes_gradients: whether updates may call ``recompute_gradients()``; with ``None``, they may if
            ``optimizer_step`` is overridden and a method of the class names it
    """

    saves_attributes: ClassVar[bool] = True
    unsaved_attributes: ClassVar[Collection[str]] = ()
    recomputes_gradients: ClassVar[bool | None] = None

    def __init__(
        self,
        model: nn.Module,
        loss_func: LossFunction | None,
        optimizer: Optimizers | OptimizerFactory | None,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback] | None] = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
        *,
        accelerator: Accelerator | None = None,
        mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = None,
        metrics: str | Sequence[str] | Metric | MetricCollection | Mapping[str, Metric | str] | None = None,
        seed: int | None = None,
        compile_model: bool | Literal["blocks"] | dict[str, Any] = False,
        compile_step: bool | dict[str, Any] = False,
        channels_last: bool = False,
        check_replicas: bool = True,
        find_unused_parameters: bool = False,
        logical_processes: int | None = None,
        deterministic: bool | None = None,
        activation_checkpointing: ChosenModules = False,
    ) -> None:
        before = vars(self).keys() - _GIVEN
        launched_processes.respect_launcher()
        arguments_and_datasets.check_types(
            model=model,
            run_history=run_history,
            accelerator=accelerator,
            compile_model=True if compile_model == "blocks" else compile_model,
            compile_step=compile_step,
        )
        arguments_and_datasets.check_constructor(loss_func, optimizer, seed)
        self.model = model
        self.loss_func = loss_func
        self.optimizer = optimizer_factories.combine_or_defer(optimizer)
        self._callbacks = callbacks
        self.callback_handler = self._create_callback_handler()
        if metrics is not None:
            create = METRICS.get(f"metrics={short_repr(metrics)}")
            self.callback_handler.add_callback(create(metrics), first=True)
        self.run_history: RunHistory = InMemoryRunHistory() if run_history is None else run_history
        self._set_up_accelerator(accelerator, mixed_precision, find_unused_parameters)
        self.seed = None if seed is None else int(seed)  # generators reject numpy's integers
        self.compile_model: bool | Literal["blocks"] | dict[str, Any] = compile_model
        self.activation_checkpointing = activation_checkpointing
        self.channels_last, self.check_replicas, self.deterministic = channels_last, check_replicas, deterministic
        self.scheduler: TrainerScheduler = None
        self.create_scheduler_fn: SchedulerFactory | None = None
        self.registered_objects: dict[str, HasStateDict] = {}
        self.prepared_model: PreparedModel | None = None
        self.open_runs: list[Run] = []
        self.current_run = Run.create(self, RunRequest(), ranks=find_ranks(self.accelerator))
        self.current_run.data.seed = self.seed
        self.division = create_division("logical_processes", logical_processes, self.ranks, self.seed)
        self._batch_adapter = BatchAdapter(model)
        self.compiled_forward = model_setup.create_compiled_forward(self, compile_step, self._batch_adapter)
        model_setup.apply_block_options(self)
        shutdown.register(self)
        vars(self)[LIBRARY_ATTRIBUTES] = vars(self).keys() - before
        self.callback_handler.call_event("on_init_end", self)

    # ------------------------------------------------------------------- training, evaluation, prediction

    def train(
        self,
        train_dataset: NamedData,
        num_epochs: int | None = None,
        eval_dataset: NamedData | None = None,
        per_device_batch_size: int = DEFAULT_BATCH_SIZE,
        max_num_train_steps: int | None = None,
        gradient_accumulation_steps: int | Mapping[int, int] = 1,
        gradient_clip_value: float | None = None,
        create_scheduler_fn: ScheduleArgument | None = None,
        train_dataloader_kwargs: LoaderKwargs | None = None,
        eval_dataloader_kwargs: LoaderKwargs | None = None,
        reset_run_history: bool = True,
        collate_fn: CollateFunction | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        *,
        gradient_clip_norm: float | None = None,
        eval_every_n_epochs: int = 1,
        evaluate_every: str | Interval | None = None,
        scheduler_interval: Literal["update", "epoch"] = "update",
        scheduler_metric: str | None = None,
        warmup_steps: int | float = 0,
        auto_microbatch: bool = False,
        sanity_check: bool = True,
    ) -> None:
        """Train the model.

        Args:
            train_dataset: a map or iterable dataset, or a ``DataLoader`` of one, which keeps its own options; batches
                are ``(inputs, targets)`` or dicts. A dict of map datasets gives dicts of batches, see
                ``NamedDatasets``; for shares of several datasets, see ``Mixture``.
            num_epochs: number of passes over the training data
            eval_dataset: dataset or ``DataLoader`` to evaluate on, see ``eval_every_n_epochs``; ``None`` for no
                evaluation. Datasets in a dict are evaluated one by one, and their names (strings) prefix the names of
                the metrics.
            per_device_batch_size: number of samples in a batch of one process. Like ``collate_fn`` and the dataloader
                kwargs, it applies to datasets: a ``DataLoader`` has its own.
            max_num_train_steps: number of optimizer updates after which to stop; overrides ``num_epochs``
            gradient_accumulation_steps: number of batches per process in one update. A dict changes it after a number
                of updates: with ``{0: 1, 1000: 4}``, updates use four times as many samples after 1000 updates
            gradient_clip_value: maximum absolute value of each element of the gradients
            gradient_clip_norm: maximum total norm of the gradients
            create_scheduler_fn: ``"constant"``, ``"linear"``, ``"cosine"`` or ``"wsd"``, as long as the run, see
                ``warmup_steps``; or a function that is called with the optimizer and returns a scheduler, such as a
                ``functools.partial``, which may contain ``TrainerPlaceholderValues``. For several optimizers, it may be
                a dict of these by optimizer name; optimizers that are not in the dict keep their rates.
            train_dataloader_kwargs: arguments for the training ``DataLoader``, which override the defaults
            eval_dataloader_kwargs: arguments for the evaluation ``DataLoader``, which override the defaults
            reset_run_history: whether to delete the metrics of earlier runs
            collate_fn: makes a batch from a list of samples
            resume_from: training state to resume from: its directory, or ``"latest"`` for the newest intact one in the
                ``save_dir`` of the ``SaveTrainingStateCallback``, if any; pass the same data and arguments as before
            eval_every_n_epochs: evaluate after every n epochs, and after the last
            evaluate_every: instead, evaluate at an ``Interval``, such as ``"500 updates"``, ``"0.25 epochs"``,
                ``"100_000 samples"`` or ``"10 minutes"``, and at the end of the run
            scheduler_interval: step the scheduler after every ``"update"``, or after every ``"epoch"`` and its
                evaluation
            scheduler_metric: with ``"epoch"``, the metric whose latest value is passed to the scheduler's ``step``, as
                ``ReduceLROnPlateau`` needs; must be recorded before the end of the epoch's evaluation. The scheduler is
                then stepped after every evaluation, also within an epoch, and not after epochs without one.
            warmup_steps: with a schedule by name, the number of updates (or epochs, see ``scheduler_interval``) over
                which the rate rises linearly; a number below 1 is a fraction of the run
            auto_microbatch: if a batch does not fit into device memory, split it and all later ones into as many
                micro-batches as needed, and accumulate their gradients, which are those of the whole batch; likewise
                evaluation batches, whose losses and metrics are those of the whole batch
            sanity_check: before the first update, try model, loss and metrics on one batch of each ``eval_dataset``
                that can be indexed, so that mistakes show before an epoch is over. Nothing of it is kept or counted.

        Raises:
            NonFiniteLossError: if ``TerminateOnNaNCallback`` encounters a loss that is infinite or NaN
        """
        request = RunRequest(
            "training",
            num_epochs=num_epochs,
            max_num_train_steps=max_num_train_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clip_value=gradient_clip_value,
            gradient_clip_norm=gradient_clip_norm,
            scheduler_interval=scheduler_interval,
            scheduler_metric=scheduler_metric,
            eval_every_n_epochs=eval_every_n_epochs,
            evaluate_every=None if evaluate_every is None else parse_interval("evaluate_every", evaluate_every).text,
            auto_microbatch=auto_microbatch,
            sanity_check=bool(sanity_check),
        )
        if self.is_running:
            raise RuntimeError(
                "train() cannot be called within a run, nor while predict_iter() is being iterated over. End the run "
                "first by raising StopTrainingError, or close the iterator."
            )
        size = per_device_batch_size
        train_arguments = DataArguments(train_dataset, size, train_dataloader_kwargs, collate_fn)
        eval_arguments = DataArguments(eval_dataset, size, eval_dataloader_kwargs, collate_fn)
        arguments_and_datasets.check_dataset(self, "train_dataset", train_arguments, eval_dataset)
        arguments_and_datasets.check_resume_from(resume_from)
        if not is_created(self.optimizer):  # several, or a factory, may have been assigned
            self.optimizer = optimizer_factories.combine_or_defer(self.optimizer)
        arguments_and_datasets.check_training(self.optimizer, self.accelerator, request)
        has_schedule = create_scheduler_fn is not None or warmup_steps
        schedule = resolve_names(create_scheduler_fn, warmup_steps, scheduler_interval) if has_schedule else None
        arguments_and_datasets.check_optimizers(self)
        if eval_dataset is not None:
            arguments_and_datasets.check_dataset(self, "eval_dataset", eval_arguments, train_dataset)
        self.create_scheduler_fn = schedule
        fit(self, Run.create(self, request, train_arguments, eval_arguments), resume_from, reset_run_history)

    def evaluate(
        self,
        dataset: NamedData | None = None,
        per_device_batch_size: int | None = None,
        dataloader_kwargs: LoaderKwargs | None = None,
        collate_fn: CollateFunction | None = None,
        *,
        auto_microbatch: bool = False,
    ) -> dict[str, MetricValue]:
        """Evaluate the model, counting every sample exactly once on any number of processes.

        Can be called within a training run, which continues as if the evaluation had not happened. The other arguments
        are those of ``train()``.

        Args:
            dataset: a dataset or a ``DataLoader``; defaults to the ``eval_dataset`` of the last training run, and is
                not needed if ``create_eval_dataloader`` is overridden. Datasets in a dict are evaluated one by one, and
                their names (strings) prefix the names of the metrics. Without ``dataset``, arguments that are not
                passed are those of that training, so that the same batches are read.
            per_device_batch_size: number of samples in a batch of one process; 8 by default
            dataloader_kwargs: arguments for the ``DataLoader``, which override the defaults; ``drop_last=True`` leaves
                out the samples of a smaller last batch
            auto_microbatch: if a batch does not fit into device memory, split it and all later ones into as many parts
                as needed; losses and metrics are those of the whole batch. Always on within a run that uses it.

        Returns:
            the latest value of every metric recorded during this evaluation, by name. The values are also appended to
            the run history, except, within a run, for metrics that the run's own evaluations record. After a run, its
            curves and rows do not contain them.
        """
        has_size = per_device_batch_size is not None
        size = DEFAULT_BATCH_SIZE if per_device_batch_size is None else per_device_batch_size
        arguments = DataArguments(dataset, size, dataloader_kwargs, collate_fn, auto_microbatch, has_size)
        return evaluation.evaluate(self, arguments)

    def run_evaluation(
        self,
        model: nn.Module | None = None,
        prefix: str = "",
        is_intermediate: bool = True,
        callbacks: CallbackHandler | Iterable[TrainerCallback] | None = None,
    ) -> dict[str, float]:
        """Evaluate on the ``eval_dataset`` of the current training run without changing the run.

        Call it from a callback, on every process. Modes, running losses and random generators are restored. The
        evaluations of the run itself do not call it: to add to each of them, override ``eval_epoch_start`` or
        ``eval_epoch_end``.

        Args:
            model: a module to evaluate in place of the trainer's model, for example averaged weights. Checkpoints saved
                meanwhile still contain the trainer's model.
            prefix: prefix of the metric names in the run history
            is_intermediate: passed to the evaluation events. If ``True``, losses are recorded as
                ``intermediate_eval_loss``, otherwise as ``eval_loss_epoch``.
            callbacks: called instead of the trainer's callbacks; a list, or a ``CallbackHandler`` to use it again

        Returns:
            the mean losses by metric name

        Raises:
            RuntimeError: if called outside a training run, or in one without an ``eval_dataset``
        """
        kind = evaluation.EvaluationKind.from_flags(is_training=True, is_intermediate=is_intermediate)
        return evaluation.run_evaluation(self, model, prefix, kind, callbacks)

    def predict(
        self,
        dataset: Data,
        per_device_batch_size: int = DEFAULT_BATCH_SIZE,
        dataloader_kwargs: LoaderKwargs | None = None,
        collate_fn: CollateFunction | None = None,
        *,
        only_first: bool = False,
    ) -> Tree:
        """Return the model's outputs for every sample, in the order of the dataset, on the CPU.

        Takes the same arguments as ``evaluate()``, and can be called in the same places. If ``dataloader_kwargs`` has a
        ``sampler`` or ``batch_sampler``, the outputs are for its samples, in its order.

        Args:
            dataset: a dataset, or a ``DataLoader`` in order, with or without targets, which are ignored
            only_first: return the outputs only on the first process, and ``None`` on the others, which then need no
                memory for them. All processes must make the call.

        Returns:
            the outputs of the model, concatenated over all samples, as a tensor of shape ``(len(dataset), ...)``, or as
            tuples, lists or dicts of such tensors; the same on every process unless ``only_first``
        """
        arguments = DataArguments(dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
        return prediction.predict(self, arguments, only_first)

    def predict_iter(
        self,
        dataset: Data,
        per_device_batch_size: int = DEFAULT_BATCH_SIZE,
        dataloader_kwargs: LoaderKwargs | None = None,
        collate_fn: CollateFunction | None = None,
        *,
        only_first: bool = False,
    ) -> Iterator[Tree]:
        """Yield the outputs of ``predict()`` in parts, in the order of the dataset and the same on every process.

        Only a few batches are in memory at any time: several processes gather their outputs after a fraction of a
        second or at 4 MiB. Iterate to the end on every process; with ``only_first``, all but the first get ``None`` for
        each part. Meanwhile the model is in evaluation mode, except within another run, where its own mode is restored
        between the parts.
        """
        arguments = DataArguments(dataset, per_device_batch_size, dataloader_kwargs, collate_fn)
        return prediction.predict_iter(self, arguments, only_first)

    # Tools of extensions are bound as they are: an extension is deleted with its lines here.
    find_lr = lr_finder.find_lr
    find_batch_size = batch_size_finder.find_batch_size
    check = program_check.check
    diagnose = diagnosis.diagnose
    estimate_memory = estimate.estimate_memory
    logical = logical_of_trainer
    summary = layer_summary.summary

    # --------------------------------------------------------------------------------- saving and loading

    def save_checkpoint(
        self,
        save_path: PathOrFile,
        checkpoint_kwargs: StateDict | None = None,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        save_per_node: bool = True,
        *,
        trainable_only: bool = False,
    ) -> None:
        """Save the weights as one portable file, written atomically. Call it on every process.

        The file includes what the loss function has learned, everything else that is trained, such as heads and
        critics, wherever it is, and modules in attributes that the run has changed (unless ``saves_attributes = False``
        in the trainer's class).

        Args:
            save_path: path of the file, usually ending in ``.pt``; missing folders are created. Or an open binary file
                or ``io.BytesIO``, which the main process of the job writes from its position, flushes and leaves open;
                the other processes may pass anything.
            checkpoint_kwargs: further entries of the file, under names that it does not have already
            save_optimizer: whether to include the state of the optimizer, and of optimizers that are attributes
            save_scheduler: whether to include the state of the scheduler, if any, and of schedulers that are attributes
            save_per_node: whether to save once on every machine, instead of once in the job
            trainable_only: whether to leave out frozen parameters of the model, see ``save_model()``

        Raises:
            ValueError: if ``trainable_only`` would leave out everything, an entry has the name of one that the file has
                already, or a file is closed or cannot be written
        """
        saving.save_checkpoint(
            self, save_path, checkpoint_kwargs, save_optimizer, save_scheduler, save_per_node, trainable_only
        )

    def load_checkpoint(
        self,
        checkpoint_path: PathOrFile,
        load_optimizer: bool = True,
        load_scheduler: bool = True,
        *,
        strict: bool = True,
    ) -> StateDict:
        """Load what ``save_checkpoint()`` or ``save_model()`` saved, or weights, without running any code in it.

        Also loads the states of the loss function and of the trainer's attributes, if both the file and the trainer
        have them. Weights that were left out (``trainable_only=True``) stay as they are, with a warning if they differ
        from those of the saved model.

        Args:
            checkpoint_path: path of the file, or of a directory of safetensors files; if the model is sharded, each
                process reads only its own shards. A model from ``save_model()`` may be given by its URL. Or a training
                state, for its weights alone: pass ``load_optimizer=False, load_scheduler=False``. Or an open binary
                file, which each process reads from its own position.
            load_optimizer: whether to load the state of the optimizer, if it was saved
            load_scheduler: whether to load the state of the scheduler, if it was saved and the trainer has a scheduler
            strict: ``False`` to load only the weights that fit, and warn of the others

        Returns:
            the full content of the file

        Raises:
            ValueError: if it does not fit the model; lists missing and unexpected keys
        """
        return loading.load_checkpoint(self, checkpoint_path, load_optimizer, load_scheduler, strict=strict)

    def save_model(
        self, path: PathOrFile, *, trainable_only: bool = False, card_data: Mapping[str, object] | None = None
    ) -> None:
        """Save the model for use in other programs: its weights as safetensors, and a model card.

        In a directory, models of transformers, PEFT, diffusers and timm are saved in the format of their library, with
        configuration and tokenizer; see "Save and load" in the docs.

        A directory gets ``model.safetensors``, ``README.md`` and, with matplotlib, ``curves.png``, each written
        atomically. The card says how the model was trained, how good it is, and how to load it with PyTorch alone. The
        Hugging Face Hub shows it as the model's page, and ``huggingface_hub.ModelCard`` reads it. A ``README.md`` that
        somebody else wrote is kept, with a warning.

        Call it on every process. Sharded weights are gathered in the host memory of the first process, which writes the
        files.

        Args:
            path: path of the directory, or its URL in a remote store, such as ``"hf://name/repository"``; missing
                folders are created. A path that ends in ``.safetensors`` is a single file with the weights alone. So is
                an open binary file or ``io.BytesIO``, which the main process writes from its position, flushes and
                leaves open; the other processes may pass anything.
            trainable_only: whether to leave out frozen parameters, which ``load_checkpoint()`` then does not change.
            card_data: further metadata of the card, such as ``{"license": "mit", "datasets": ["mnist"], "pipeline_tag":
                "image-classification"}``; see ``huggingface_hub.ModelCardData``

        Raises:
            ValueError: if ``trainable_only`` would leave out everything, if ``path`` is a file and should be a
                directory, or if it is a URL of an unknown kind
            TypeError: if ``card_data`` is not a dict of texts, numbers, and lists and dicts of them
            OSError: if a file cannot be written
        """
        saving.save_model(self, path, trainable_only=trainable_only, card_data=card_data)

    def save_training_state(
        self,
        output_dir: StrPath,
        checkpoint_kwargs: StateDict | None = None,
        *,
        writer: BackgroundWriter | None = None,
        then: Callable[[], None] | None = None,
        created_weights: Mapping[str, int] | None = None,
        sharded: bool = False,
    ) -> None:
        """Save everything needed to resume the run, as a directory that is either complete or does not exist.

        Call it on every process, between updates: in ``on_train_step_checkpoint`` or ``on_epoch_checkpoint``, or after
        a run.

        Args:
            output_dir: directory of the state, or a URL such as ``"s3://bucket/state"`` (see
                ``SaveTrainingStateCallback``); an existing state is replaced once the new one is complete
            checkpoint_kwargs: further entries, returned by ``load_training_state()`` besides its own
            writer: writes a copy of the state in host memory while training continues; ``None`` to write immediately
            then: called on every process once the state is complete
            created_weights: checksums of weights that the resuming program creates itself; frozen parameters that
                still have them are left out. By default, all weights are saved.
            sharded: whether each process writes its own shards of sharded weights and of their optimizer state. By
                default, they are gathered in the host memory of the first process, which writes them.

        Raises:
            TypeError: if a value cannot be stored without pickle; names the path to it
            ValueError: if an entry has the name of one that ``load_training_state()`` returns of itself
            OSError: if the state cannot be written
            RuntimeError: within a step or an accumulation window, even if the run was interrupted there, or in an epoch
                whose order does not follow from a seed
        """
        saving.save_training_state(self, output_dir, checkpoint_kwargs, writer, then, created_weights, sharded)

    def load_training_state(self, input_dir: StrPath) -> StateDict:
        """Load a training state into the trainer. To resume a run, use ``train(resume_from=...)``, which calls this.

        Args:
            input_dir: directory or URL of the state

        Returns:
            the metadata of the state, ``current_epoch``, and the entries given as ``checkpoint_kwargs``

        Raises:
            DamagedStateError: if the state is damaged; names the file
            ValueError: if it does not fit the model or the optimizer
        """
        return loading.load_training_state(self, input_dir)

    def check_weights(self) -> None:
        """Check that all trained parameters are finite and no buffer is NaN, before saving. Reads from the device.

        Call it on every process.

        Raises:
            NonFiniteLossError: on all processes, if a weight is infinite or NaN on any of them
        """
        saving.check_weights(self)

    def register_for_checkpointing(self, name: str, obj: HasStateDict) -> None:
        """Include one of your own objects in every training state.

        A resumed run restores it before it starts, and again when training continues, as ``train_epoch_start()`` and
        starting events may have reset it. ``find_lr`` and the like leave it as it was.

        Args:
            name: name of the object; the same in the resumed run
            obj: an object with ``state_dict()`` and ``load_state_dict(state)``. Both are called on every process. The
                state of the first process is saved for all: if states differ, ``gather()`` them in ``state_dict()``.
        """
        if not hasattr(obj, "state_dict") or not hasattr(obj, "load_state_dict"):
            raise TypeError(f"{name}={obj!r} must have state_dict() and load_state_dict(state).")
        if name in self.registered_objects:
            raise ValueError(f"An object is already registered as {name!r}. Choose another name.")
        self.registered_objects[name] = obj

    # ---------------------------------------------------------------------------------- steps to override

    def training_run_start(self) -> None:
        """Called when a training run starts."""

    def train_epoch_start(self) -> None:
        """Called when a training epoch starts. Sets the model to training mode by default."""
        self.model.train()

    def calculate_train_batch_loss(self, batch: BatchData) -> BatchOutput:
        """Return the loss and the outputs of a training batch.

        By default, a tuple or list ``(inputs, targets)`` is used as ``loss_func(model(inputs), targets)``; further
        elements, such as indices, are left to your own callbacks and steps. A dict is used as ``model(**batch)`` with
        the keys that ``forward`` takes. The other keys are the targets (a single one is passed as its value, as is
        ``target``, ``labels`` or ``y`` to a loss of torch), unless an optional argument is named like a target
        (``labels=None``); or the model returns its own ``loss``.

        Returns:
            a dict with ``loss``, a scalar tensor that is a mean over the batch, or a dict of named scalars whose sum is
            minimised; optionally ``model_outputs``; ``batch_size``, derived from the batch if missing;
            ``num_items_in_batch`` if the loss is a mean over something other than samples, such as tokens; and anything
            else that callbacks need
        """
        adapter = self.compiled_forward or self._batch_adapter
        return adapter.outputs_and_loss(self.model, self.loss_func, batch, self.current_run.batch)

    def train_step(self, batch: BatchData) -> BatchOutput | None:
        """Run a training step. Override it if one loss and one update are not enough, as in a GAN.

        Compute losses and call ``update()`` for each, as often as needed. A step counts as one update, however often it
        calls ``update()``. The model is then not wrapped in ``DistributedDataParallel``.

        Returns:
            values for callbacks; optionally ``loss``, to be recorded instead of the losses passed to ``update``
        """
        output = self.calculate_train_batch_loss(batch)
        self.update(total_loss(output["loss"]), num_items=output.get("num_items_in_batch"))
        return output

    def backward_step(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss, already weighted by its share of the accumulation window."""
        if self.prepared_model is not None and self.prepared_model.is_plain:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.accelerator.backward(loss)

    def clip_gradients(self) -> None:
        """Clip the gradients according to the run config. Called once per update, on unscaled gradients."""
        config = self.current_run.config or self.current_run.required_config  # inlines this property in a run
        if config.gradient_clip_value is not None or config.gradient_clip_norm is not None:
            clipping.clip_as_configured(self, config)

    def optimizer_step(self) -> None:
        """Update the weights."""
        take_step(self.optimizer, *self.current_run.training_step.closure)

    def scheduler_step(self) -> None:
        """Step the scheduler. Called once per update, unless ``update_was_skipped``, or once per epoch."""
        if self.scheduler is None:
            return
        metric = self.current_run.required_config.scheduler_metric
        if metric is None:
            self.scheduler.step()
        else:
            self.scheduler.step(latest_metric(f"scheduler_metric={metric!r}", metric, self))

    def advance_scheduler(self, num_updates: int) -> None:
        """Advance a newly created scheduler to its position after a number of updates.

        Called instead of restoring the scheduler's state when a run is resumed with a different number of updates per
        epoch. Steps the scheduler ``num_updates`` times by default. Override it if the scheduler is stepped
        differently.

        Args:
            num_updates: number of updates that a run with the new settings would have made for the samples seen so far

        Raises:
            TypeError: if ``scheduler_step`` is overridden and this method is not
        """
        if "scheduler_step" in self.current_run.overridden:
            raise TypeError(f"{type(self).__name__}.scheduler_step is overridden, so how to advance is unknown.")
        for _ in range(num_updates):
            self.scheduler.step()

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients after an update."""
        clear_gradients(self.optimizer)

    def train_epoch_end(self) -> None:
        """Called when a training epoch ends, before its losses are recorded."""

    def eval_epoch_start(self) -> None:
        """Called when an evaluation starts. Sets the model to evaluation mode by default."""
        self.model.eval()

    def calculate_eval_batch_loss(self, batch: BatchData) -> BatchOutput:
        """Return the loss and the outputs of an evaluation batch, like ``calculate_train_batch_loss()``.

        No gradients are computed. An override may return ``None`` as ``loss`` to evaluate only with metrics.
        """
        with without_gradients():
            return self._batch_adapter.outputs_and_loss(self.model, self.loss_func, batch, self.current_run.batch)

    def eval_epoch_end(self) -> None:
        """Called when an evaluation ends, before its losses are recorded."""

    def training_run_epoch_end(self) -> None:
        """Called when an epoch ends, after its evaluation."""

    def training_run_end(self) -> None:
        """Called when a training run ends."""

    def evaluation_run_start(self) -> None:
        """Called when ``evaluate`` starts."""

    def evaluation_run_end(self) -> None:
        """Called when ``evaluate`` ends."""

    def calculate_predict_batch_output(self, batch: BatchData) -> Tree:
        """Return the model's outputs for a batch in ``predict``. Override it to post-process them.

        By default, the model is called with the first element of a tuple or list, or with the keys of a dict that
        ``forward`` takes, without targets such as ``labels``, unless ``forward`` requires them.
        """
        return self._batch_adapter.predict(self.model, batch)

    # ------------------------------------------------------------------------ parts of a run, to override

    def create_train_dataloader(
        self, batch_size: int, train_dl_kwargs: LoaderKwargs | None = None
    ) -> Iterable[BatchData]:
        """Return the loader of training batches. Override it to create your own.

        The samples of a ``DataLoader`` over a map dataset are divided among the processes; for other iterables, see
        ``pytorch_accel_lite.data``.

        Args:
            train_dl_kwargs: the user's arguments, which override those of ``get_default_train_dl_kwargs()``

        Returns:
            by default, a ``DataLoader`` of ``self.train_dataset``, or that itself if it is a loader
        """
        defaults = self.get_default_train_dl_kwargs(batch_size)
        source, self._train_dl_kwargs = torch_loader(self.train_dataset, self.collate_fn, defaults, train_dl_kwargs)
        return source  # type: ignore[no-any-return]

    def create_eval_dataloader(
        self, batch_size: int, eval_dl_kwargs: LoaderKwargs | None = None
    ) -> Iterable[BatchData]:
        """Return the loader of evaluation batches; see ``create_train_dataloader()``."""
        defaults = self.get_default_eval_dl_kwargs(batch_size)
        source, self._eval_dl_kwargs = torch_loader(self.eval_dataset, self.collate_fn, defaults, eval_dl_kwargs)
        return source  # type: ignore[no-any-return]

    def get_default_train_dl_kwargs(self, batch_size: int) -> LoaderKwargs:
        """Return the default arguments of the training dataloader: shuffled, with workers if they are worthwhile."""
        return default_loader_kwargs(self.train_dataset, batch_size, True, self.accelerator)

    def get_default_eval_dl_kwargs(self, batch_size: int) -> LoaderKwargs:
        """Return the default arguments of the evaluation dataloader: in order, with workers if they are worthwhile."""
        return default_loader_kwargs(self.eval_dataset, batch_size, False, self.accelerator)

    def create_scheduler(self) -> TrainerScheduler:
        """Return the scheduler of a run, or ``None``. Calls ``create_scheduler_fn(optimizer)`` by default."""
        if self.create_scheduler_fn is None:
            return None
        return scheduling.create_scheduler_from(self, self.create_scheduler_fn)

    def parallelize_model(self, mesh: DeviceMesh) -> str | os.PathLike[str] | None:
        """Override it to shard ``self.model`` in place, before the first run. The optimizer must then be a factory.

        Args:
            mesh: a ``DeviceMesh`` of all processes: the accelerator's, or one with a single dimension, ``"dp"``

        Returns:
            file or directory of safetensors for the tensors on the meta device; ``None`` to initialise them
        """

    def _create_accelerator(self) -> Accelerator:
        """Create the ``Accelerator`` if none was passed."""
        return default_accelerator(self._requested_precision)

    def _create_callback_handler(self) -> CallbackHandler:
        """Create what calls the callbacks, with those that extensions add."""
        handler = CallbackHandler(self._callbacks)
        for create in ADDED_TO_EACH_TRAINER:
            handler.add_callbacks(create())
        return handler

    def _create_run_config(self, per_device_batch_size: int, **settings: Any) -> TrainerRunConfig:
        """Return the settings of the run, of which some are passed. The run calls it only if it is overridden."""
        run = self.current_run
        return loaders_and_lengths.resolve_run_config(
            self, run, replace(run.request, **settings), per_device_batch_size
        )

    # --------------------------------------------------------------------- for steps and callbacks to use

    # Bound directly, not wrapped: a wrapper would cost a call in every step, and hide the call in reports of hangs.
    log = trainer_log.log
    recompute_gradients = replaying_step.recompute_gradients
    gather = gather_and_broadcast.gather
    barrier = gather_and_broadcast.barrier
    broadcast_object = gather_and_broadcast.broadcast_object
    all_gather_object = gather_and_broadcast.all_gather_object
    tensor_to_numeric = gather_and_broadcast.tensor_to_numeric
    sync_buffers = gather_and_broadcast.sync_buffers

    def update(
        self,
        loss: torch.Tensor,
        optimizer: str | None = None,
        *,
        num_items: Count | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Update the parameters of one optimizer with the gradients of a loss, in an overridden ``train_step``.

        Runs the backward pass for the parameters of that optimizer only, then clips the gradients, steps the optimizer
        and its scheduler, and clears the gradients. With ``gradient_accumulation_steps``, gradients accumulate, and
        everything after the backward pass happens in the last step of the window. With several processes, gradients are
        averaged here without ``DistributedDataParallel``, so any part of the model may be called any number of times.
        Call it on every process.

        Args:
            loss: a scalar tensor, the mean over the samples of the batch
            optimizer: name of the optimizer to update; may be omitted if there is only one
            num_items: number of items averaged in the loss, if these are not samples but tokens, for example. The mean
                recorded for the epoch is then over items, too. The sum of several losses is recorded as a mean over
                samples, unless the same number is passed for all losses.
            retain_graph: keep the graph for another loss over the same outputs

        Raises:
            ValueError: if the optimizer is unknown, or the loss does not depend on its parameters
        """
        run = self.current_run
        run.training_step.update_optimizer(self, run, loss, optimizer, num_items, retain_graph)

    def get_model(self, keep_torch_compile: bool = True) -> nn.Module:
        """Return the model without its wrappers for distributed training.

        Args:
            keep_torch_compile: whether to keep the wrapper of ``torch.compile``
        """
        trained = self.current_run.trained_model
        model = self.model if trained is None else trained
        if self.prepared_model is not None and self.prepared_model.outlives_runs:
            unwrapped: nn.Module = self.accelerator.unwrap_model(model, keep_torch_compile=keep_torch_compile)
            return unwrapped
        return unwrap(model, keep_torch_compile)

    def rewrap_model(self) -> None:
        """Tell ``DistributedDataParallel`` that the set of trained parameters has changed. Call it on every process.

        Call it after freezing or unfreezing parameters in the middle of a run, between updates, for example in
        ``on_train_epoch_start``: the wrapper averages only gradients of parameters that were trained when it was
        created. With one process, it does nothing.

        Raises:
            RuntimeError: if the weights are sharded, or Accelerate has compiled the wrapper
        """
        model_setup.rewrap_model(self)

    @property
    def can_rewrap_model(self) -> bool:
        """Whether ``rewrap_model()`` works: not if weights are sharded or Accelerate has compiled the wrapper."""
        return self.prepared_model is None or self.prepared_model.can_rewrap(self.model)

    def skip_update(self) -> None:
        """Skip the coming update, leaving weights, optimizer and scheduler unchanged.

        Call it in ``on_optimizer_step_start``, on every process. ``progress.update`` still counts the update.

        Raises:
            RuntimeError: if no update is about to be made, where it would do nothing
        """
        skipped_updates.skip(self)

    @property
    def update_was_skipped(self) -> bool:
        """Whether the last update was skipped, by ``skip_update()`` or by a gradient scaler due to infinities.

        After a ``train_step`` that updates several optimizers, whether any of them was skipped.
        """
        return skipped_updates.was_skipped(self)

    def compare_replicas(self) -> None:
        """Check that all processes hold the same weights, to the last bit. Call it on every process.

        Checks every trained parameter (of the optimizer, and of optimizers that are attributes of a subclass) and the
        frozen parameters of the model. Skips sharded weights, and buffers, which may differ between two forward passes.

        Raises:
            RuntimeError: if they differ; names the ranks, the parameter and the likely cause
        """
        same_on_all_ranks.compare_replicas(self)

    def call_event(self, event: str, **kwargs: object) -> None:
        """Call an event, which may be your own, on all callbacks. Every process must call it.

        On a single process, a request to end the run is raised after the event; on several, or with logical processes,
        it is synchronised. A pause waits for the next point from which the run can be resumed exactly.
        """
        handler = self.callback_handler
        if not handler.listeners[event]:
            return
        control = self.current_run.control
        if control.ranks.world_size > 1 or control.syncs_each_update:
            handler.call_event_passing_stops(event, control.request, self, **kwargs)
            return
        try:
            handler.call_event(event, self, **kwargs)
        except RunPausedError as pause:
            control.request(pause)
        except StopTrainingError:
            # A state that is saved now counts the update, so a run resumed from it would never have its event.
            if event == "on_train_step_end" and self.current_run.window.is_between_updates:
                self.call_event("on_update_end", step=kwargs["step"])
            raise

    @property
    def is_running(self) -> bool:
        """Whether a training, evaluation or prediction run is in progress."""
        return bool(self.open_runs)

    @property
    def is_sharded(self) -> bool:
        """Whether the weights of the model are sharded over the processes (FSDP, DeepSpeed, ``fully_shard``)."""
        prepared = self.prepared_model
        return is_sharded(self.accelerator, self.model) if prepared is None else prepared.is_sharded

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.accelerator.device  # type: ignore[no-any-return]

    @Shadowable
    def callbacks(self) -> tuple[TrainerCallback, ...]:
        """The callbacks, in the order in which they are called. Add one with ``callback_handler.add_callback``."""
        return tuple(self.callback_handler)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print once on every machine. What the encoding of the output lacks is escaped, and ends no run."""
        if not self.accelerator.is_local_main_process:
            return  # without converting tensors, which would wait for the device
        separator = kwargs.pop("sep", None)
        # One text is written whole, or not at all.
        text = (" " if separator is None else separator).join(map(str, args))
        try:
            self.accelerator.print(text, **kwargs)
        except UnicodeEncodeError as error:
            encoding = error.encoding
            self.accelerator.print(text.encode(encoding, "backslashreplace").decode(encoding), **kwargs)

    # ---------------------------------------------------------------------------- the current or last run

    @property
    def run(self) -> Run:
        """The run in progress, or else the last one: its data, step, losses, end and so on, for callbacks to read."""
        return self.current_run

    @property
    def progress(self) -> Progress:
        """The progress of the current or last run: its epoch, update, step and so on."""
        return self.current_run.progress

    @property
    def ranks(self) -> Ranks:
        """The processes of the job, and their communication."""
        return self.current_run.ranks

    @property
    def data_ranks(self) -> Ranks:
        """The processes, as the data are divided among them: in tensor parallelism, several share each batch."""
        return self.current_run.data.ranks

    @property
    def run_config(self) -> TrainerRunConfig | None:
        """The settings of the run in progress, or else of the latest training or, without one, evaluation."""
        run = self.current_run
        return run.config if run.latest.training is None or self.open_runs else run.latest.training.config

    @run_config.setter
    def run_config(self, config: TrainerRunConfig | None) -> None:
        run = _run_for_assignment(self)
        run.config = config
        if config is not None and run.latest.training is not None:
            run.latest.training = run.latest.training._replace(config=config)

    @property
    def step_metrics(self) -> dict[str, MetricValue]:
        """Values measured by callbacks in the latest update, by name: numbers, or tensors on the device."""
        return self.current_run.step_metrics

    @step_metrics.setter
    def step_metrics(self, metrics: dict[str, MetricValue]) -> None:
        _run_for_assignment(self).step_metrics = metrics

    @property
    def train_dataset(self) -> Source:
        """The dataset that the run trains on."""
        return self.current_run.data.train_dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Source) -> None:
        _run_for_assignment(self).data.train_dataset = dataset
        _warn_if_not_read(self, "train_dataset", dataset, self.train_dataloader)

    @property
    def eval_dataset(self) -> Source:
        """The dataset that the run evaluates on."""
        return self.current_run.data.eval_dataset

    @eval_dataset.setter
    def eval_dataset(self, dataset: Source) -> None:
        _run_for_assignment(self).data.eval_dataset = dataset
        _warn_if_not_read(self, "eval_dataset", dataset, self.eval_dataloader)

    @property
    def collate_fn(self) -> CollateFunction | None:
        """The function that makes a batch from a list of samples, if it was passed."""
        return self.current_run.data.collate_fn

    @collate_fn.setter
    def collate_fn(self, collate_fn: CollateFunction | None) -> None:
        _run_for_assignment(self).data.collate_fn = collate_fn

    @property
    def train_dataloader(self) -> ShardedLoader | None:
        """The loader of this process's training batches. During a run, it can be replaced for the next epoch."""
        return self.current_run.data.train_loader

    @train_dataloader.setter
    def train_dataloader(self, loader: Source) -> None:
        run = _run_for_assignment(self, loader_of="train")
        run.data.train_loader = None if loader is None else sharded_for_run(self, run, loader, training=True)

    @property
    def eval_dataloader(self) -> ShardedLoader | None:
        """The loader of this process's evaluation batches, for the dataset being evaluated."""
        return self.current_run.data.eval_loader

    @eval_dataloader.setter
    def eval_dataloader(self, loader: Source) -> None:
        run = _run_for_assignment(self, loader_of="eval")
        run.data.eval_loader = None if loader is None else sharded_for_run(self, run, loader, training=False)

    @property
    def eval_dataloaders(self) -> list[ShardedLoader]:
        """The loaders of this process's evaluation batches, for all datasets."""
        return self.current_run.data.all_eval_loaders

    # The names in pytorch-accelerated.
    _train_dataloader = train_dataloader
    _eval_dataloader = eval_dataloader

    @property
    def _train_dl_kwargs(self) -> LoaderKwargs | None:
        return self.current_run.data.train_loader_kwargs

    @_train_dl_kwargs.setter
    def _train_dl_kwargs(self, kwargs: LoaderKwargs | None) -> None:
        _run_for_assignment(self).data.train_loader_kwargs = kwargs

    @property
    def _eval_dl_kwargs(self) -> LoaderKwargs | None:
        return self.current_run.data.eval_loader_kwargs

    @_eval_dl_kwargs.setter
    def _eval_dl_kwargs(self, kwargs: LoaderKwargs | None) -> None:
        _run_for_assignment(self).data.eval_loader_kwargs = kwargs

    @property
    def _loss_tracker(self) -> LossTracker:
        return self.current_run.loss_trackers["loss"]

    @_loss_tracker.setter
    def _loss_tracker(self, tracker: LossTracker) -> None:
        self.current_run.loss_trackers["loss"] = tracker

    # A subclass may use these names for its own attributes, as nothing in the package reads them.

    @Shadowable
    def recorded_losses(self) -> dict[str, float]:
        """The mean losses of the last epoch or evaluation, by metric name."""
        return self.current_run.recorded_losses

    @Shadowable
    def loss_trackers(self) -> LossTrackers:
        """The running losses of the epoch or evaluation, by name."""
        return self.current_run.loss_trackers

    @Shadowable
    def running_loss(self) -> float:
        """The mean loss of the epoch so far, on this process. Reads from the device, so avoid it in every step."""
        return self._loss_tracker.average

    @Shadowable
    def gradient_norm(self) -> torch.Tensor:
        """The total norm of the gradients of an update, before they are clipped, as a tensor on the device.

        For use in ``on_optimizer_step_start``; until the step has ended, it is known if it was read there or if the
        gradients are clipped by norm. The same on all processes, and computed when first accessed. In an overridden
        ``train_step``, it is the norm for the optimizer being updated.

        Raises:
            RuntimeError: if the gradients of the update are not complete yet, or cleared already
        """
        return clipping.total_norm(self)

    @Shadowable
    def num_microbatches(self) -> int:
        """The number of parts that a batch is split into, with ``auto_microbatch``."""
        return self.current_run.training_step.num_microbatches

    @Shadowable
    def stop_reason(self) -> str | None:
        """Why the last training or evaluation run was stopped early; ``None`` if it was not."""
        return self.current_run.end.reason

    @Shadowable
    def is_finished(self) -> bool:
        """Whether all requested epochs or updates are complete."""
        return self.current_run.is_finished

    @Shadowable
    def evaluation_is_due(self) -> bool:
        """Whether the current epoch is followed by an evaluation."""
        return self.current_run.evaluation_is_due

    @Shadowable
    def eval_dataset_name(self) -> str | None:
        """The name of the dataset being evaluated, if there are several."""
        return self.current_run.data.eval_dataset_name

    @Shadowable
    def batch_indices(self) -> list[Index] | None:
        """The indices in the dataset of the samples in this process's current batch, for use in callbacks and steps.

        ``None`` if unknown, as for streams and for loaders other than a ``DataLoader``. Empty for a filler batch, which
        only keeps this process in step with the others and has no weight.
        """
        return self.current_run.batch_indices

    @Shadowable
    def clock(self) -> float:
        """Seconds since the start of the run, the same on every process (as of their last synchronisation)."""
        return self.current_run.clock

    @Shadowable
    def goodput(self) -> Goodput:
        """How the time of the job was spent, its restarts included."""
        return self.current_run.goodput

    # ---------------------------- hooks of a run, also those of pytorch-accelerated, which the loop calls

    def _run_training(self) -> None:
        """Train for all epochs of the run. An override may have a loop of its own, see ``loop/custom_loops.py``."""
        training.train(self, self.current_run)

    def _run_train_epoch(self, train_dl: Iterable[BatchData]) -> bool:
        """Run the steps of an epoch; return whether all updates have been made, if their number was given."""
        return custom_loops.train_epoch_on(self, self.current_run, train_dl)

    def _run_eval_epoch(
        self, valid_dl: Iterable[BatchData], is_training: bool = True, is_intermediate: bool = False
    ) -> None:
        """Evaluate on one dataset, within a training run or alone, and record its losses."""
        kind = evaluation.EvaluationKind.from_flags(is_training, is_intermediate)
        evaluation.evaluate_dataset(self, self.current_run, valid_dl, kind)

    def _create_step(self, run: Run) -> Step:
        """Choose how the run trains on a batch, and whether that is compiled."""
        return create_step(self, run)

    @reserved
    def _check_scheduler(self, request: RunRequest) -> None:
        """Check that the scheduler can be stepped as the run requests."""
        scheduling.check_scheduler(self, request, "scheduler_step" in self.current_run.overridden)

    @reserved
    def _step_after_epoch(self) -> None:
        """Step the scheduler after an epoch and its evaluation, if it is due."""
        step_after_epoch(self)

    # ---------------------------------------------------------- creating, closing and showing the trainer

    def _set_up_accelerator(self, accelerator: Accelerator | None, precision: str | None, find_unused: bool) -> None:
        """Set the accelerator that was passed, or a new one, after all checks."""
        arguments_and_datasets.check_mixed_precision(precision, accelerator)
        self._requested_precision = precision
        self._made_accelerator = accelerator is None
        if accelerator is None:
            accelerator = create_accelerator(self._create_accelerator, precision)
            # An overridden method may have created it with another precision.
            arguments_and_datasets.check_mixed_precision(precision, accelerator)
        launched_processes.check_launch(accelerator)
        arguments_and_datasets.check_parallelism(accelerator)
        if find_unused:
            find_unused_in_ddp(accelerator)
        self.accelerator = self._accelerator = accelerator  # the second is the name in pytorch-accelerated

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_subclass(cls, Trainer)

    def close(self) -> None:
        """Release all resources, after which the trainer cannot be used. Called by ``with Trainer(...) as trainer:``.

        Called automatically when the program exits, followed by an orderly shutdown of a job of several processes. An
        accelerator that was passed keeps what it has prepared: other code may use it.
        """
        if shutdown.unregister(self):
            run = self.current_run
            run.data.train_loader, run.data.eval_loader, run.data.eval_loaders, run.batch = None, None, {}, None
            if self._made_accelerator:
                self.accelerator.free_memory()

    def __getstate__(self) -> dict[str, object]:
        """Leave the schedule of the last run out of copies: placeholders cannot be pickled, and a run sets its own."""
        return {**vars(self), "create_scheduler_fn": self.create_scheduler_fn if self.is_running else None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __dir__(self) -> list[str]:
        """List the names for users: without this package's private names and the names of other libraries."""
        return names_for_users(self, super().__dir__())

    def __repr__(self) -> str:
        """Show the model, optimizer, device, callbacks, and other settings that are not at their defaults."""
        if "current_run" not in vars(self):  # its constructor has not finished
            return object.__repr__(self)
        model = self.get_model(keep_torch_compile=False)
        sizes = [0 if isinstance(p, UninitializedParameter) else p.numel() for p in model.parameters()]
        lazy = " + ?" if any(isinstance(p, UninitializedParameter) for p in model.parameters()) else ""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's wrapper, in a run
        parts: dict[str, object] = {
            "model": type(model).__name__,
            "parameters": f"{sum(sizes):,}{lazy}",
            "optimizer": type(optimizer).__name__ if is_created(optimizer) else repr(optimizer),
            "device": self.device,
        }
        if self.ranks.world_size > 1:
            parts["processes"] = self.ranks.world_size
        if self.accelerator.mixed_precision != "no":
            parts["mixed_precision"] = self.accelerator.mixed_precision
        if self.seed is not None:
            parts["seed"] = self.seed
        listening = join_wrapped("callbacks=[", map(repr, self.callback_handler), "]")
        described = [f"{name}={value}" for name, value in parts.items()]
        return join_wrapped(f"{type(self).__name__}(", [*described, listening], ")")


class TrainerWithTimmScheduler(Trainer):
    """A ``Trainer`` for timm's schedulers, stepped as in timm's own training script. Needs the extra ``timm``.

    Calls ``step_update(num_updates)`` after every update, and ``step(epoch, metric)`` after every epoch, with the
    number of finished epochs and the latest loss. The scheduler's ``t_in_epochs`` determines which takes effect.
    """

    @Shadowable
    def num_updates(self) -> int:
        """The number of updates so far, scaled if the run was resumed with a different number of updates per epoch."""
        return self.progress.update + self.current_run.schedule.shift

    def scheduler_step(self) -> None:
        """Step the scheduler after an update."""
        if self.scheduler is not None:
            self.scheduler.step_update(num_updates=self.num_updates)

    def advance_scheduler(self, num_updates: int) -> None:
        """Step a new scheduler to its position after a number of updates."""
        self.scheduler.step_update(num_updates=num_updates)

    def _step_after_epoch(self) -> None:
        """Step the scheduler after an epoch: if the run evaluates, a plateau schedule only after its evaluations."""
        run, scheduler, epoch = self.current_run, self.scheduler, self.progress.epoch
        if scheduler is None:
            return
        is_evaluated = run.evaluation_interval is None or run.evaluation_is_due
        loss = next(iter(run.recorded_losses.values()), None) if is_evaluated else None
        follows_loss = hasattr(scheduler, "lr_scheduler")  # timm's plateau schedule, which wraps that of torch
        if loss is not None or not follows_loss or epoch <= scheduler.warmup_t:
            scheduler.step(epoch, loss)

    def _check_scheduler(self, request: RunRequest) -> None:
        """Check the scheduler, and that the run does not say when it is stepped."""
        scheduling.check_scheduler(self, request, steps_itself=True)
        if request.scheduler_interval != "update":
            raise ValueError(
                f"scheduler_interval={request.scheduler_interval!r}: TrainerWithTimmScheduler steps timm's schedulers "
                "after both updates and epochs, as needed. Omit scheduler_interval and scheduler_metric."
            )
