"""Types of what users pass to be read, and of what is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from pytorch_accel_lite.base.types import Tree

#: A dataset, a stream or a loader: of torch, of another library or of the user, who may pass any of them.
Source: TypeAlias = Any
#: What draws the indices of samples, or batches of them: of torch, of another library or of the user.
SamplerLike: TypeAlias = Any
#: The index of a sample in a dataset: a number, or what else a sampler of the user yields.
Index: TypeAlias = Any
#: A sample of a dataset: what the user's dataset returns for an index.
Sample: TypeAlias = Any
#: What a loader yields and a step is given: as the user's dataset and collate function make it.
BatchData: TypeAlias = Tree
#: What makes a batch of a list of samples.
CollateFunction: TypeAlias = Callable[[list[Sample]], BatchData]
#: What training states keep of a source or a loader, which alone understands it: plain values, such as a position.
SourceState: TypeAlias = Any


class IndexedData(Protocol):
    """Data with a length and an element for each sample: a list, an array, a dataset of another library."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Index, /) -> Sample: ...
