"""The seam for companion files of a saved model, which are written beside its weights, such as a model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from pytorch_accel_lite.run.run import TrainerLike


class SavedModel(NamedTuple):
    """A model in a directory that already has its weights.

    Args:
        folder: the directory; for a URL, a temporary directory whose files are then uploaded
        location: the path or URL passed to ``save_model()``
        trainable_only: whether frozen parameters were left out
        card_data: the argument of ``save_model()``; empty by default
    """

    folder: Path
    location: Path | str
    trainable_only: bool
    card_data: Mapping[str, object]


class CompanionWriter(Protocol):
    """Writes companion files, such as a description, beside the weights of each model that is saved in a directory."""

    def check(self, card_data: Mapping[str, object]) -> None:
        """Check the user's ``card_data`` on each process, before anything is saved.

        Raises:
            TypeError: if the data cannot be written; likewise ``ValueError``
        """

    def write(self, trainer: TrainerLike, saved: SavedModel) -> None:
        """Write the files. Called only on the first process."""


#: The writers of companion files by name, in the order of their calls. An extension adds its own.
COMPANION_WRITERS: dict[str, CompanionWriter] = {}
