"""The notebooks of the examples: ``python -m tests.notebooks`` runs them and stores their outputs."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient

from tests.launching import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


# Which bars last long enough to be shown depends on how busy the machine is.
NO_BARS = "import pytorch_accel_lite.callbacks.tqdm_bars as bars; bars._DELAY = float('inf')"


def execute(notebook: Any, folder: Path) -> Any:
    """Run all cells of a notebook in a folder."""
    resources = {"metadata": {"path": str(folder)}}
    with patch.dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"):
        NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources, record_timing=False).execute()
    return notebook


def execute_together(notebooks: dict[str, Any], folders: Path) -> None:
    """Run the cells of several notebooks by name in one kernel, which forgets names, each in a folder of its own."""
    cells = [nbformat.v4.new_code_cell(NO_BARS)]
    for name, own in notebooks.items():
        (folders / name).mkdir()
        cells += [nbformat.v4.new_code_cell("%reset -f"), nbformat.v4.new_code_cell(f"%cd -q {folders / name}"), *own]
    for number, cell in enumerate(cells):  # those of two notebooks may have the same ids
        cell.id = f"cell-{number}"
    execute(nbformat.v4.new_notebook(cells=cells), folders)


def shown_by(cell: Any) -> list[str]:
    """What a cell shows, in an order of its own: lines of text and tags without their numbers, and pictures."""
    found = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/png" in data:
            found.append("a picture")
        else:
            text = data.get("text/html") or data.get("text/plain") or output.get("text", "")
            found += re.split(r"\n|(?<=>)", text)
    # Which epoch was the best, and what took long enough to be listed, is not the same on every machine.
    found = [line for line in found if not re.search(r"[\d.]+ s +[\d.]+%$", line)]
    plain = (re.sub(r"[-\d][\d.,:e+-]*( ?[s%]\b)?|</?b>|[*]|\s+", " ", line).strip() for line in found)
    return sorted(" ".join(line.split()) for line in plain if line)


def main() -> None:
    """Run all notebooks, and write them with their outputs."""
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        metadata = notebook.metadata.copy()
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        notebook.metadata = metadata  # without the version of Python
        nbformat.write(notebook, path)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
