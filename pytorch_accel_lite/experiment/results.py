"""Results of several runs: as rows, as tables for a terminal, and as files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.callbacks import PredictionWriterCallback, TrainerCallback
from pytorch_accel_lite.checkpoint import replacing
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import import_extra

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]


class Results:
    """Results that are a table, with a row for each run, whose name is in the first column."""

    def rows(self) -> list[Row]:
        """Return a dict for each row."""
        raise NotImplementedError

    def to_dataframe(self) -> pd.DataFrame:
        """Return :meth:`rows` as a ``pandas.DataFrame`` indexed by its first column. Needs the extra ``dataframe``."""
        frame: pd.DataFrame = import_extra("pandas", "dataframe", "to_dataframe()").DataFrame(self.rows())
        return frame.set_index(frame.columns[0])


def text_table(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Columns that do not fit into the terminal follow below, after the first one again.

    :param columns: the cells of each column, the first of which is its name. The first column is left-aligned, the
        others are right-aligned.
    """
    first, *others = columns
    labels = [cell.ljust(max(map(len, first))) for cell in first]
    blocks = [labels]
    for cells in others:
        width = max(map(len, cells))
        if len(blocks[-1][0]) + 2 + width > shutil.get_terminal_size().columns and blocks[-1] is not labels:
            blocks.append(labels)
        blocks[-1] = [line + "  " + cell.rjust(width) for line, cell in zip(blocks[-1], cells, strict=True)]
    return [line.rstrip() for block in blocks for line in ["", *block]][1:]


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file, atomically."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(text)


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a file in JSON, atomically."""
    write_text(path, json.dumps(content, indent=indent) + "\n")


@contextmanager
def added_callbacks(trainer: Trainer, *callbacks: TrainerCallback | None) -> Iterator[None]:
    """Add callbacks to a trainer within a block; ``None`` stands for none."""
    handler = trainer.callback_handler
    before = trainer.callbacks
    handler.add_callbacks([callback for callback in callbacks if callback is not None])
    try:
        yield
    finally:
        handler.clear_callbacks()
        handler.add_callbacks(before)


def write_predictions(trainer: Trainer, dataset: Any, writer: PredictionWriterCallback, **reading: Any) -> int:
    """Predict the samples of a dataset that a callback has not written yet, and return the number of batches.

    :param reading: how the dataset is read, as arguments of :meth:`Trainer.predict`
    """
    with added_callbacks(trainer, writer):
        return sum(1 for _ in trainer.predict_iter(dataset, **reading))
