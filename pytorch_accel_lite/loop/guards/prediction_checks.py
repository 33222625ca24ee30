"""Checks of the order of predictions, and warnings if they lack a row for each sample, or some of the outputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.base.display.formatting import listed
from pytorch_accel_lite.base.display.user_warnings import warn_outside
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.values.nested_data import parts_in
from pytorch_accel_lite.data.batch_size import infer_batch_size
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.concatenation import ListOfSamples
from pytorch_accel_lite.data.dataloader_creation import LoaderKwargs
from pytorch_accel_lite.data.sources import SamplerLike, Source

#: Names of random samplers of torch, and of torchdata, which has classes of its own.
_RANDOM = ("RandomSampler", "SubsetRandomSampler")


def check_order(dataset: Source, loader_kwargs: LoaderKwargs) -> None:
    """Check that a dataset is predicted in order, or with a sampler that is passed beside it, and a loader likewise.

    Raises:
        ValueError: if samples would be shuffled or left out
    """
    is_loader = isinstance(dataset, DataLoader)
    options = loader_kwargs
    if is_loader:
        samplers = [part for part in (dataset.batch_sampler, dataset.sampler) if part is not None]
        samplers += [part.sampler for part in samplers if hasattr(part, "sampler")]
        drops_last = any(getattr(part, "drop_last", False) is True for part in (dataset, *samplers))
        options = {"shuffle": any(map(_shuffles, samplers)), "drop_last": drops_last}
    for key in ("shuffle", "drop_last"):
        if options.get(key):
            raise ValueError(
                f"{'dataset' if is_loader else 'dataloader_kwargs'} has {key}={options[key]!r}, but predict returns "
                f"the outputs for every sample, in the order of the dataset. Omit {key}."
            )


def _shuffles(sampler: SamplerLike) -> bool:
    """Whether a sampler gives a random order, as far as that is known."""
    is_random = type(sampler).__name__ in _RANDOM and type(sampler).__module__.startswith("torch")
    return is_random or getattr(sampler, "shuffle", False) is True


def warn_of_rows(batch: Batch, output: Tree) -> bool:
    """Warn if no output has a row for each sample; return whether the batch was sufficient to know."""
    if batch.num_samples is None or batch.num_samples < 2:
        return False
    sizes = {batch.num_samples, infer_batch_size(batch.data, batch.num_samples)}
    if isinstance(output, ListOfSamples):
        return True  # a detector's list with an element for each sample
    rows = [len(part) for part in parts_in([output]) if isinstance(part, torch.Tensor) and part.ndim]
    if rows and sizes.isdisjoint(rows):
        warn_outside(
            f"The model returned {rows[0]} rows for a batch of {batch.num_samples} samples. Predictions are "
            "concatenated as they are, so they will not have a row for each sample, and how many there are depends on "
            "the batch size and the number of processes. Return outputs with the samples in the first dimension."
        )
    return True


def warn_of_lost_lists(batch: Batch, output: Tree) -> None:
    """Warn of texts and numbers of each sample that are left out of a dict of outputs, as they are not tensors."""
    size = batch.num_samples
    if not isinstance(output, Mapping) or size is None or size < 2:  # of one sample, each list may be a setting
        return
    lost = [repr(name) for name, value in output.items() if _has_values_of_samples(value, size)]
    if lost:
        warn_outside(
            f"predict leaves out {listed(lost)}: in a dict of outputs, only tensors are kept. Return tensors, such as "
            "the indices of samples, or a list with a dict for each sample."
        )


def _has_values_of_samples(value: object, size: int) -> bool:
    """Whether an array, or a list of texts or numbers, has an element for each sample."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == size
    return type(value) is list and len(value) == size and all(isinstance(item, (str, int, float)) for item in value)
