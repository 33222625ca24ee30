"""A batch, and what is known of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Share(NamedTuple):
    """The share of a logical process in a step.

    :param number: number of the logical process
    :param place: the mixed seed, epoch and position of the step, from which random numbers follow
    :param ends_step: whether it is the last of this step on this process
    """

    number: int
    place: int
    ends_step: bool


class Batch(NamedTuple):
    """A batch of this process, with the number of samples of all processes in the same step.

    :param data: the batch, on the device
    :param num_samples: number of samples of this process. 0 for a filler batch, which only keeps the process in step
        with the others and must get no weight. ``None`` if only the step that uses the batch can tell.
    :param total_samples: number of samples of all processes in this step; ``None`` if unknown, like ``num_samples``
    :param is_last: whether this is the last step of the epoch
    :param indices: indices of the samples in the dataset, as a list or a tensor; ``None`` if unknown
    :param dataset_name: name of the dataset of a mixture that all samples of the step are from, if they are from one
    :param share: the share of a logical process that this is, or the last of those in a step of training, whose
        ``data`` are the batches of all; ``None`` without logical processes
    """

    data: Any
    num_samples: int | None
    total_samples: int | None
    is_last: bool
    indices: Any = None
    dataset_name: str | None = None
    share: Share | None = None

    def samples(self, output: Mapping[str, Any]) -> tuple[int, int]:
        """Return the number of samples of this process and of all processes, taken from ``output`` if unknown."""
        own = int(output["batch_size"]) if self.num_samples is None else self.num_samples
        return own, own if self.total_samples is None else self.total_samples

    @property
    def batch(self) -> Any:
        """The data, under their name in version 0.1."""
        return self.data
