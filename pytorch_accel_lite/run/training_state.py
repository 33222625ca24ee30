"""The contents of a training state, and the attributes that a program had created before its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from pytorch_accel_lite.base.types import StateDict

#: The names of an owner and of one of its attributes.
Key = tuple[str, str]


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
    """

    directory: Path | str
    metadata: StateDict
    shared: StateDict
    local: StateDict | None = None
    weights: dict[str, torch.Tensor] | None = None
    tensors: Mapping[str, OpenTensor] = field(default_factory=dict)
    postponed: set[str] = field(default_factory=set)


@dataclass(eq=False, repr=False)
class CreatedAttributes:
    """The attributes that a program had created when a run began.

    Attributes:
        digests: a digest of each attribute of moderate size
        settings: the serialised form of each attribute that holds only numbers and texts
        names: names of the attributes that the program had created, by the name of their owner
        changed: attributes that are known to have changed
        warned_of: paths of values that states cannot keep, for which a warning has been given
        compared: attributes whose arguments the comparison of settings has reported
        trainability: which parameters are trainable after the starting events
    """

    digests: dict[Key, str] = field(default_factory=dict)
    settings: dict[Key, object] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    changed: set[Key] = field(default_factory=set)
    warned_of: set[str] = field(default_factory=set)
    compared: set[Key] = field(default_factory=set)
    trainability: dict[str, dict[str, bool]] = field(default_factory=dict)
