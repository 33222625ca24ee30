"""``trainer.find_batch_size()``: the largest batches that fit into memory."""

from __future__ import annotations

from bisect import bisect

from accelerate.utils.memory import clear_device_cache
from torch.utils.data import DataLoader

from pytorch_accel_lite.data import Batch, CollateFunction, LoaderKwargs, NamedData, OwnShard, Source
from pytorch_accel_lite.extending import RunRequest, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_dict, check_positive_int
from pytorch_accel_lite.extension_tools.data_and_batches import as_one_dataset
from pytorch_accel_lite.extension_tools.modules_and_devices import is_out_of_memory
from pytorch_accel_lite.extensions.trials import Trial


def find_batch_size(
    self: TrainerLike,
    train_dataset: NamedData,
    start: int = 2,
    max_batch_size: int | None = None,
    num_steps: int = 2,
    train_dataloader_kwargs: LoaderKwargs | None = None,
    collate_fn: CollateFunction | None = None,
) -> int:
    """Find the largest batch size per process with which training fits into memory.

    Sizes are doubled until one does not fit, and then bisected; all processes agree on the result. The model, the
    optimizer and the generators are restored afterwards. The result only just fits: if samples differ in size, a
    slightly smaller batch is safer.

    Args:
        start: first size to try
        max_batch_size: largest size to try; defaults to a process's share of the dataset
        num_steps: number of updates with each size
        train_dataset: a dataset with a length, or a ``DataLoader`` of such a dataset, whose batch size is replaced

    Raises:
        RuntimeError: if not even one sample fits
    """
    start = check_positive_int("start", start)
    check_positive_int("num_steps", num_steps)
    train_dataset = as_one_dataset(train_dataset)
    most = _most_samples(train_dataset, self.ranks.world_size, train_dataloader_kwargs, max_batch_size)
    request, kwargs = RunRequest(num_epochs=1), train_dataloader_kwargs
    trial = Trial(self, "find_batch_size", train_dataset, 1, request, kwargs, collate_fn, sets_batch_size=True)
    with trial.running():

        def fits(size: int) -> bool:
            return _can_train_on(trial, trial.read_batch(size), num_steps)

        self.train_epoch_start()
        largest, size = 0, min(start, most)
        while largest < most and fits(size):
            largest, size = size, min(2 * size, most)
        largest += bisect(range(largest + 1, size), False, key=lambda between: not fits(between))
    if not largest:
        raise RuntimeError("Not even a batch of one sample fits into memory.")
    self.print(f"The largest batch size that fits is {largest}{' (the maximum)' if largest == most else ''}.")
    return largest


def _most_samples(
    train_dataset: Source, world_size: int, loader_kwargs: LoaderKwargs | None, max_batch_size: int | None
) -> int:
    """Return the largest batch size that can be tried."""
    fixed = {"batch_size", "batch_sampler"} & check_dict("train_dataloader_kwargs", loader_kwargs).keys()
    if fixed:
        raise ValueError(f"train_dataloader_kwargs has {sorted(fixed)}, but find_batch_size() chooses them itself.")
    is_loader = isinstance(train_dataset, (DataLoader, OwnShard))
    if is_loader and getattr(train_dataset, "batch_size", None) is None:
        kind = type(train_dataset).__name__
        raise ValueError(f"train_dataset: find_batch_size() cannot change the batches of {kind}. Pass its dataset.")
    data = train_dataset.dataset if isinstance(train_dataset, DataLoader) else train_dataset
    if not hasattr(data, "__len__"):
        raise TypeError(f"train_dataset: {type(data).__name__} has no length, which find_batch_size() needs.")
    most = len(data) // world_size
    if max_batch_size is not None:
        most = min(most, check_positive_int("max_batch_size", max_batch_size))
    if most < 1:
        raise ValueError(f"train_dataset has only {len(data)} samples, too few for a batch on every process.")
    return most


def _can_train_on(trial: Trial, batch: Batch, num_steps: int) -> bool:
    """Make a few updates with a batch, each process on its own, so that no process waits for one that fails."""
    trainer = trial.trainer
    failed = False
    with trial.alone():
        try:
            for _ in range(num_steps):
                update_from(trial, batch)
        except Exception as error:
            failed = is_out_of_memory(error)
            if not failed:
                raise
    trainer.optimizer_zero_grad()
    trial.run.batch = None  # to free its memory for the next batch
    clear_device_cache(garbage_collection=failed)
    return not any(trainer.all_gather_object(failed))


def update_from(trial: Trial, batch: Batch) -> None:
    """Update the weights from one batch."""
    trial.trainer.backward_step(trial.loss_of(batch))
    trial.run.training_step.can_skip_update = True  # an overridden optimizer_step may
    trial.trainer.optimizer_step()
    trial.trainer.optimizer_zero_grad()
