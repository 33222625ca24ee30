"""Results of several runs: as rows, as tables for a terminal, and as files."""

from __future__ import annotations

import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.callbacks import RunPausedError, TrainerCallback
from pytorch_accel_lite.checkpoint import write_text
from pytorch_accel_lite.extensions.predictions import PredictionWriterCallback
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import import_extra

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]


class Results:
    """Results as a table, with a row for each run. The first column has the name of the run."""

    def rows(self) -> list[Row]:
        """Return a dict for each row."""
        raise NotImplementedError

    def to_dataframe(self) -> pd.DataFrame:
        """Return ``rows()`` as a ``pandas.DataFrame`` indexed by its first column. Needs the extra ``dataframe``."""
        frame: pd.DataFrame = import_extra("pandas", "dataframe", "to_dataframe()").DataFrame(self.rows())
        return frame.set_index(frame.columns[0])


def text_table(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Columns too many for the terminal follow below, after the first column again.

    Args:
        columns: the cells of each column, the first of which is its name. The first column is left-aligned, the others
            are right-aligned.
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


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a file in JSON, atomically."""
    write_text(path, json.dumps(content, indent=indent) + "\n")


def as_one_line(value: Any) -> Any:
    """Return an argument as one line of JSON, which is the same for arguments that were created identically."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return value if isinstance(value, (int, float, type(None))) else " ".join(text.split())


def as_number(value: Any) -> float | str:
    """Return a metric as a float, or as text if it is not a single number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)


def check_is_new(trainer: Trainer, seen: weakref.WeakSet[Any], source: str, consequence: str) -> None:
    """Check that an earlier run has not already trained a trainer or its model.

    Args:
        seen: the trainers and models of earlier runs; this trainer and its model are added
        source: the call that returned the trainer
        consequence: which run had it, and what would go wrong, for the message

    Raises:
        ValueError: if an earlier run has; names the call
    """
    for part in (trainer, trainer.get_model(keep_torch_compile=False)):
        if part in seen:
            raise ValueError(
                f"{source} returned the {type(part).__name__} of {consequence}. Create a new one each time."
            )
        seen.add(part)


def check_is_same(folder: Path, before: Row, now: Row, kind: str) -> None:
    """Check that results in a folder were begun with the same settings.

    Args:
        kind: what the folder contains, in a word or two

    Raises:
        ValueError: names the first setting that differs, and both values
    """
    for name in before | now:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"save_dir={os.fspath(folder)!r} has {kind} with {name}={before.get(name)}, not {now.get(name)}. "
                "Resume it with the same arguments, or choose another save_dir."
            )


def read_finished(path: Path) -> Any:
    """Return the results that a run has written at its end; ``None`` if the run is not finished."""
    if not path.exists():
        return None
    print(f"{path.parent} is finished: skipped")
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that ``write_json()`` has written.

    Raises:
        ValueError: if the file has other contents; names the file
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Remove it to start over.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold names and values, but holds {str(content)[:60]!r}. Remove it.")
    return content


def train_to_end(trainer: Trainer, folder: Path, again: str, resume: bool = True, **arguments: Any) -> None:
    """Train, from the newest training state if there is one.

    Args:
        folder: the folder of the run
        again: how to continue, for the message
        resume: ``False`` to start over
        arguments: arguments of ``Trainer.train()``

    Raises:
        RunPausedError: if a callback pauses the training; says how to continue
    """
    saves_states = any(hasattr(callback, "find_latest") for callback in trainer.callbacks)
    trainer.train(**arguments | ({"resume_from": "latest"} if resume and saves_states else {}))
    if (pause := trainer.current_run.end.pause) is not None:
        raise RunPausedError(f"{pause} {folder} is not finished: {again}.")


@contextmanager
def added_callbacks(trainer: Trainer, *callbacks: TrainerCallback | None) -> Iterator[None]:
    """Add callbacks to a trainer for the duration of a ``with`` block; ``None`` is ignored."""
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

    Args:
        reading: how the dataset is read, as arguments of ``Trainer.predict()``
    """
    with added_callbacks(trainer, writer):
        return sum(1 for _ in trainer.predict_iter(dataset, **reading))
