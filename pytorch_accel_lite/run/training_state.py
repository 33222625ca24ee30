"""A training state that has been read, from which a run may resume: its contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from pytorch_accel_lite.base.types import StateDict


class OpenTensor(Protocol):
    """A tensor in open files."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102

    def read(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """Read the tensor, sharded like another one of its shape."""


@dataclass(eq=False, repr=False)
class TrainingState:
    """The contents of a training state, except the weights.

    Args:
        directory: the folder of the state, or the URL of a remote one
        metadata: facts about the run from the manifest: progress, processes, versions ...
        shared: the state that all ranks share: optimizer, scheduler, history, callbacks ...
        local: the state of this rank: its generators and its part of the running losses; ``None`` if another number of
            processes saved the state
        weights: the weights, if they have already been read, as from a remote state, whose local copy is removed
        tensors: large or sharded tensors in open files, by name; ``shared`` has marks in their place
        postponed: names of optimizers that are restored later, when they have all their parameter groups
        has_other_weights: whether the model lacks weights of the state, which the starting events may add
    """

    directory: Path | str
    metadata: StateDict
    shared: StateDict
    local: StateDict | None = None
    weights: dict[str, torch.Tensor] | None = None
    tensors: Mapping[str, OpenTensor] = field(default_factory=dict)
    postponed: set[str] = field(default_factory=set)
    has_other_weights: bool = False
