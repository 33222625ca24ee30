"""What is written beside the weights of a saved model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from pytorch_accel_lite.run.state import TrainerLike


class SavedModel(NamedTuple):
    """A model in a directory, whose weights are there.

    :param folder: the directory; that of a model at a URL is a temporary one, whose files are then sent there
    :param location: the path or URL that ``save_model()`` was called with
    :param trainable_only: whether the frozen parameters were left out
    :param card_data: what ``save_model()`` was called with; empty for nothing
    """

    folder: Path
    location: Path | str
    trainable_only: bool
    card_data: Mapping[str, object]


class ModelWriter(Protocol):
    """What is written beside the weights of each model that is saved in a directory, such as a description."""

    def check(self, card_data: Mapping[str, object]) -> None:
        """Check on each process, before anything is saved, what a user has passed as ``card_data``.

        :raises TypeError: if it cannot be written; likewise ``ValueError``
        """

    def write(self, trainer: TrainerLike, saved: SavedModel) -> None:
        """Write it. Only the first process does."""


#: What is written, by name, in this order. An extension adds its own.
MODEL_WRITERS: dict[str, ModelWriter] = {}
