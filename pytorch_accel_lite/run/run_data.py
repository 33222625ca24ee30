"""The data of a run and their loaders, what it evaluates on, and the batches that it skips because they fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pytorch_accel_lite.base.weak_sets import TransientSet
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.loader_base import ShardedLoader
from pytorch_accel_lite.data.loader_creation import DEFAULT_BATCH_SIZE, LoaderKwargs
from pytorch_accel_lite.data.sources import CollateFunction, NamedData
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.run.events import Failure


class DataArguments(NamedTuple):
    """What to read, and how, as it was passed to ``train()``, ``evaluate()`` or ``predict()``.

    Args:
        dataset: a dataset or a loader, or several by name
        batch_size: number of samples in a batch of one process
        loader_kwargs: the user's arguments for the loaders, which come before the batch size and the function
        collate_fn: the user's function that makes a batch from a list of samples, if one was passed
        auto_microbatch: for an evaluation, whether batches that do not fit into memory are split
        has_batch_size: for an evaluation, whether its batch size was passed
    """

    dataset: NamedData | None = None
    batch_size: int = DEFAULT_BATCH_SIZE
    loader_kwargs: LoaderKwargs | None = None
    collate_fn: CollateFunction | None = None
    auto_microbatch: bool = False
    has_batch_size: bool = False

    @property
    def size(self) -> int:
        """The batch size as an integer of Python: one of NumPy may have been passed."""
        return int(self.batch_size)

    def completed_by(self, other: DataArguments) -> DataArguments:
        """Return these arguments, with those of ``other`` where none were passed."""
        kwargs = self.loader_kwargs
        has_function = self.collate_fn is not None
        if kwargs is None and other.loader_kwargs is not None:
            own = {"batch_size": self.has_batch_size, "collate_fn": has_function}
            kwargs = {name: value for name, value in other.loader_kwargs.items() if not own.get(name)}
        return DataArguments(
            other.dataset if self.dataset is None else self.dataset,
            self.batch_size if self.has_batch_size else other.batch_size,
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
        train_arguments: what is trained on, as it was passed, and how it is read
        eval_arguments: what is evaluated on or predicted, as it was passed, and how it is read
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
    made_loaders: TransientSet[ShardedLoader] = field(default_factory=TransientSet)
    has_fillers: bool = True
    train_arguments: DataArguments = field(default_factory=DataArguments)
    eval_arguments: DataArguments = field(default_factory=DataArguments)

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


#: Stands for the output of a batch that was skipped.
SKIPPED = object()


class SkippedStep(NamedTuple):
    """A batch that was skipped in an evaluation or a prediction.

    Args:
        failure: the failure, as callbacks are told about it
        step: the number of the batch on its process, from 0
        samples: number of samples in the batch, or ``None`` if unknown
    """

    failure: Failure
    step: int
    samples: int | None


@dataclass(slots=True, eq=False, repr=False)
class SkippedBatches:
    """The batches that are skipped in an evaluation or a prediction because their steps failed.

    Attributes:
        phase: whether the batches belong to an evaluation or a prediction
        batches: the batches of this process; after gathering, those of all processes
        is_gathered: whether the batches of all processes have been gathered
        first_error: the first error of this process
        last_computed: the last batch of this process that did not fail
    """

    phase: Literal["evaluation", "prediction"]
    batches: list[SkippedStep] = field(default_factory=list)
    is_gathered: bool = False
    first_error: Exception | None = None
    last_computed: Batch | None = None
