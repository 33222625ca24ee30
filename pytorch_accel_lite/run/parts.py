"""The parts of a run: its data, its schedule, its end, and the records it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakSet

import torch

from pytorch_accel_lite.data import NamedData, ShardedLoader
from pytorch_accel_lite.data.defaults import DEFAULT_BATCH_SIZE
from pytorch_accel_lite.data.loader import LoaderKwargs
from pytorch_accel_lite.data.sources import CollateFunction
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.optimizers.rates import Options, Rate
from pytorch_accel_lite.run.history import MetricValue
from pytorch_accel_lite.run.settings import TrainerRunConfig
from pytorch_accel_lite.run.stop_errors import RunPausedError, StopTrainingError


class EvalArguments(NamedTuple):
    """What to evaluate on, as it was passed to ``train()`` or ``evaluate()``, and how to read it.

    Args:
        dataset: a dataset or a loader, or several by name
        batch_size: number of samples in a batch of one process
        loader_kwargs: the user's arguments for the loaders, which come before the batch size and the function
        collate_fn: the user's function that makes a batch from a list of samples, if one was passed
        auto_microbatch: whether batches that do not fit into memory are split
    """

    dataset: NamedData | None = None
    batch_size: int = DEFAULT_BATCH_SIZE
    loader_kwargs: LoaderKwargs | None = None
    collate_fn: CollateFunction | None = None
    auto_microbatch: bool = False

    def completed_by(self, other: EvalArguments) -> EvalArguments:
        """Return these arguments, with those of ``other`` where these are the defaults."""
        kwargs = self.loader_kwargs
        has_size, has_function = self.batch_size != DEFAULT_BATCH_SIZE, self.collate_fn is not None
        if kwargs is None and other.loader_kwargs is not None:
            own = {"batch_size": has_size, "collate_fn": has_function}
            kwargs = {name: value for name, value in other.loader_kwargs.items() if not own.get(name)}
        return EvalArguments(
            other.dataset if self.dataset is None else self.dataset,
            self.batch_size if has_size else other.batch_size,
            kwargs,
            self.collate_fn if has_function else other.collate_fn,
            self.auto_microbatch or other.auto_microbatch,
        )


@dataclass(slots=True, eq=False, repr=False)
class RunData:
    """The data of a run, and their loaders.

    Attributes:
        ranks: the processes among which the data are divided; in tensor parallelism, several processes count as one,
            because they share each batch
        train_dataset: the dataset that the run trains on
        eval_dataset: the dataset that the run evaluates on, or a dict of datasets
        collate_fn: the user's function that makes a batch from a list of samples, if one was passed
        seed: the seed that determines the order of the data; ``None`` without a seed
        first_epoch: the number passed to ``set_epoch`` of samplers and datasets in the first epoch; 1 in runs resumed
            from states of version 0.2 and earlier
        train_loader: the loader of this process's training batches; ``None`` in an evaluation or prediction alone
        train_loader_kwargs: arguments of ``train_loader``
        eval_loader: the evaluation loader being read; one of ``eval_loaders``, which is empty for a single dataset
            without a name
        eval_dataset_name: name of the dataset being evaluated, if there are several
        eval_loaders: the loaders of evaluation batches by the names of their datasets, if there are several
        eval_loader_kwargs: arguments of the evaluation loaders
        made_loaders: loaders created for this run, whose workers end with it
        has_fillers: whether a process without samples in a step takes part in it with a filler batch
        eval_arguments: what a training run evaluates on, as it was passed, and how it is read
    """

    ranks: Ranks
    train_dataset: NamedData | None
    eval_dataset: NamedData | None
    collate_fn: CollateFunction | None
    seed: int | None = None
    first_epoch: int = 0
    train_loader: ShardedLoader | None = None
    train_loader_kwargs: LoaderKwargs | None = None
    eval_loader: ShardedLoader | None = None
    eval_dataset_name: str | None = None
    eval_loaders: dict[str, ShardedLoader] = field(default_factory=dict)
    eval_loader_kwargs: LoaderKwargs | None = None
    made_loaders: WeakSet[ShardedLoader] = field(default_factory=WeakSet)
    has_fillers: bool = True
    eval_arguments: EvalArguments = field(default_factory=EvalArguments)

    @property
    def required_train_loader(self) -> ShardedLoader:
        """The loader of the training batches.

        Raises:
            RuntimeError: if the run does not train
        """
        if self.train_loader is None:
            raise RuntimeError("There is no train_dataloader before train() has been called.")
        return self.train_loader

    @property
    def required_eval_loader(self) -> ShardedLoader:
        """The loader of the current evaluation or prediction.

        Raises:
            RuntimeError: if there is no such loader
        """
        if self.eval_loader is None:
            raise RuntimeError("There is no eval_dataloader before evaluate() has been called.")
        return self.eval_loader

    @property
    def all_eval_loaders(self) -> list[ShardedLoader]:
        """The loaders of this process's evaluation batches, for all datasets."""
        return list(self.eval_loaders.values()) or [loader for loader in [self.eval_loader] if loader is not None]


@dataclass(slots=True, eq=False, repr=False)
class RunSchedule:
    """The state of a run's learning rate schedule.

    Attributes:
        initial_options: options of the optimizer before any schedule, if the run has a schedule
        final_rates: the learning rates at the end of a run with a schedule
        shift: by how many updates the schedule is ahead of ``progress.update``, after a resumption with more or fewer
            updates per epoch
        is_recreated: whether the schedule of a resumed run is recreated rather than restored
    """

    initial_options: Options = field(default_factory=list)
    final_rates: list[Rate] = field(default_factory=list)
    shift: int = 0
    is_recreated: bool = False


@dataclass(slots=True, eq=False, repr=False)
class RunEnd:
    """How a run ends.

    Attributes:
        reason: why the run was stopped early
        stopped_by: the callback that stopped the run, as the call that created the callback
        pause: the request to pause that stopped the run
        custom_loop_is_ending: whether the custom loop of an overridden ``_run_training`` has begun the ending events
        has_failed: whether an error has ended the run
        last_calls: functions to call when the run has ended without an error and all callbacks have handled its end
    """

    reason: str | None = None
    stopped_by: str | None = None
    pause: RunPausedError | None = None
    custom_loop_is_ending: bool = False
    has_failed: bool = False
    last_calls: list[Callable[[], None]] = field(default_factory=list)

    def note(self, stop: StopTrainingError) -> None:
        """Note the request that stops the run early."""
        self.reason, self.stopped_by = str(stop) or type(stop).__name__, stop.raised_by
        self.pause = stop if isinstance(stop, RunPausedError) else None

    def make_last_calls(self) -> None:
        """Make the last calls, in the order in which they were requested."""
        for call in self.last_calls:
            call()

    @property
    def is_regular(self) -> bool:
        """Whether the run ended, possibly early, without failing or being paused."""
        return self.pause is None and not self.has_failed


class Training(NamedTuple):
    """The record of a training run for later evaluations.

    Attributes:
        config: the settings of the run
        end: how it ended
        eval_arguments: what it evaluated on, and how it was read
    """

    config: TrainerRunConfig
    end: RunEnd
    eval_arguments: EvalArguments


class Evaluation(NamedTuple):
    """The result of ``Trainer.evaluate()`` for the weights that the model has after a run.

    Attributes:
        eval_dataset: what it evaluated on
        metrics: the latest values, by metric
    """

    eval_dataset: NamedData | None
    metrics: Mapping[str, MetricValue]


class GlobalModes(NamedTuple):
    """Settings of torch that hold for the whole process.

    Attributes:
        gradients: whether gradients are computed
        autocast: whether autocast is enabled for the device of the trainer
        dtype: the dtype of new tensors
    """

    gradients: bool
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> GlobalModes:
        """Return the current settings."""
        return cls(torch.is_grad_enabled(), torch.is_autocast_enabled(device.type), torch.get_default_dtype())


class LoadedWeights(NamedTuple):
    """Weights that were loaded into the model.

    Args:
        file: name of the file or directory
        numbers: the numbers in the file, such as the epoch and the metric of a best model
        update: the number of updates of the run when the weights were loaded
    """

    file: str
    numbers: dict[str, float]
    update: int


@dataclass(slots=True, eq=False, repr=False)
class Latest:
    """Records of the latest training, evaluation and loading of weights, which outlive their runs.

    Attributes:
        training: the latest training: this run, or the run before this evaluation
        evaluation: the latest evaluation after that training, if no other weights were loaded since
        loaded: the weights that were loaded last
        recorded_by_evaluate: indices of the values that ``evaluate()`` has recorded in the history, by metric
    """

    training: Training | None = None
    evaluation: Evaluation | None = None
    loaded: LoadedWeights | None = None
    recorded_by_evaluate: dict[str, set[int]] = field(default_factory=dict)
