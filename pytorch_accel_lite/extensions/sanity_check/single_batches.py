"""Reading a batch outside the epochs of a loader, without affecting the loader."""

from __future__ import annotations

from torch.utils.data import Dataset, RandomSampler, SequentialSampler

from pytorch_accel_lite.data import Batch, FailedRead, ShardedLoader
from pytorch_accel_lite.extension_tools.data_and_batches import (
    MapLoader,
    add_missing_note,
    find_length,
    nested_in,
    reader_of,
    to_device,
)


def datasets_in(loader: ShardedLoader) -> list[object]:
    """Return the dataset of a loader and those inside it."""
    return nested_in(loader.source.dataset, lambda value: isinstance(value, Dataset))


def can_read_single_batch(loader: ShardedLoader) -> bool:
    """Whether samples can be read without side effects on the loader: from a map dataset, by integer indices."""
    if type(loader) is not MapLoader or loader.limit == 0 or loader.source.batch_size is None:
        return False
    has_plain_order = type(loader.source.sampler) in (SequentialSampler, RandomSampler)
    is_told_epochs = any(hasattr(dataset, "set_epoch") for dataset in datasets_in(loader))
    return has_plain_order and not is_told_epochs and bool(find_length(loader.source.dataset))


def read_single_batch(loader: ShardedLoader) -> Batch:
    """Read the first samples of a loader's dataset as one of its batches, in this process.

    Returns:
        the batch; if it could not be read, its ``data`` is a ``FailedRead``
    """
    source = loader.source
    indices = list(range(min(int(source.batch_size), len(source.dataset))))
    step = Batch(None, len(indices), len(indices), is_last=False, indices=indices)
    try:
        data = source.collate_fn(reader_of(source.dataset).__getitems__(indices))
    except Exception as error:
        add_missing_note(error, source.dataset, indices)
        return step._replace(data=FailedRead(error))
    return next(to_device(iter([step._replace(data=data)]), loader.device, loader.options.channels_last))
