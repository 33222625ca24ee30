"""The notebooks run from top to bottom, and bars do not flood them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.launching import ROOT

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("notebooks")]  # all share one kernel
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

FEW_OUTPUTS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import LogMetricsCallback, ProgressBarCallback
x = torch.randn(3000, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Linear(4, 1)
callbacks = [ProgressBarCallback(style=STYLE), LogMetricsCallback()]
Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks).train(data, 5, data)
"""
CURVES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import PlotMetricsCallback
x = torch.randn(40, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
Trainer(model, nn.MSELoss(), optimizer, [PlotMetricsCallback()]).train(TensorDataset(x, x.sum(1, keepdim=True)), 8)
"""
OWN = {"tqdm": FEW_OUTPUTS.replace("STYLE", "'tqdm'"), "rich": FEW_OUTPUTS.replace("STYLE", "'rich'"), "curves": CURVES}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], Path]]:
    """The cells of each notebook after it ran, and its folder: one after another in one kernel, which forgets names."""
    notebooks = {path.stem: nbformat.read(path, as_version=4).cells for path in NOTEBOOKS}
    notebooks |= {name: [nbformat.v4.new_code_cell(source)] for name, source in OWN.items()}
    cells, folders = [], {}
    for name, own in notebooks.items():
        folders[name] = tmp_path_factory.mktemp(name)
        cells += [nbformat.v4.new_code_cell("%reset -f"), nbformat.v4.new_code_cell(f"%cd -q {folders[name]}"), *own]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        for number, cell in enumerate(cells):  # those of two notebooks may have the same ids
            cell.id = f"cell-{number}"
        notebook = nbformat.v4.new_notebook(cells=cells)
        NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    return {name: (own, folders[name]) for name, own in notebooks.items()}


def test_there_are_two():
    assert len(NOTEBOOKS) == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_kept_with_its_outputs(ran, path):
    kept = nbformat.read(path, as_version=4)
    for cell, old in zip(ran[path.stem][0], kept.cells, strict=True):
        if cell.cell_type == "code":
            assert cell.execution_count
            assert sum("image/png" in output.get("data", {}) for output in cell.outputs) == sum(
                "image/png" in output.get("data", {}) for output in old.outputs
            )
    pictures = sum("image/png" in output.get("data", {}) for cell in kept.cells for output in cell.get("outputs", ()))
    assert pictures >= 2
    text = path.read_text()
    assert "Traceback" not in text
    assert "/tmp" not in text
    assert "site-packages" not in text


@pytest.mark.parametrize("style", ["tqdm", "rich"])
def test_a_run_leaves_few_outputs_in_a_notebook(ran, style):
    ((cell,), _) = ran[style]
    shown = [output for output in cell.outputs if output.output_type != "stream" or output.name == "stderr"]
    texts = [out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout"]
    assert len("".join(texts).splitlines()) == 5 * 2
    assert 1 <= len(shown) <= 10, [output.get("data", output.get("text")) for output in shown]


def test_curves_are_drawn_in_one_place_of_a_notebook(ran):
    ((cell,), folder) = ran["curves"]
    (shown,) = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    picture = base64.b64decode(shown["data"]["image/png"])
    assert picture == (folder / "metrics.png").read_bytes()  # the last
