"""The notebooks run and show their stored outputs; runs and bars print little."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, execute_together, shown_by

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("notebooks")]  # all share one kernel

SETUP = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pytorch_accel_lite import Trainer, TrainerCallback, get_default_callbacks
from pytorch_accel_lite.callbacks import LogMetricsCallback, ProgressBarCallback
x = torch.randn(40, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
ERRORS = [
    f"""{SETUP}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(5, 1)

    def forward(self, x):
        return self.second(self.first(x))

trainer = Trainer(Net(), nn.MSELoss(), optimizer)
trainer.train(data, 3)
""",
    "trainer.train(data, -3)",
    "trainer.check(data)",
]
LAUNCH = "pytorch_accel_lite.notebook_launcher(job, num_processes=2)"
LAUNCHED = [  # before there is a trainer in the kernel
    f"""import pytorch_accel_lite
import torch
from torch import nn
from torch.utils.data import TensorDataset

def job():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = pytorch_accel_lite.Trainer(model, nn.MSELoss(), optimizer)
    trainer.train(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), 3)

{LAUNCH}
""",
    f"{SETUP}trainer = Trainer(model, nn.MSELoss(), optimizer)\n"
    f"try:\n    {LAUNCH}\nexcept ValueError as error:\n    print(error)",
]
TABLES = [
    f"""{SETUP}
class Fails(TrainerCallback):
    def on_train_epoch_start(self, trainer, **kwargs):
        print("mine", trainer.progress.epoch)
        assert trainer.progress.epoch < 4, "on purpose"

trainer = Trainer(model, nn.MSELoss(), optimizer, [*get_default_callbacks(), Fails])
trainer.train(data, 3, data)
""",
    "print(sorted(trainer.evaluate(data)))\nprint(trainer.predict(data).shape)",
    "try:\n    trainer.train(data, 9, data)\nexcept AssertionError:\n    print('failed')",
    "callbacks = [ProgressBarCallback(), LogMetricsCallback()]\n"
    "Trainer(model, nn.MSELoss(), optimizer, callbacks).train(data, 5)",
]
PICTURES = [
    f"{SETUP}import matplotlib.pyplot as plt\nfrom pytorch_accel_lite.callbacks import ShowOutputsCallback\n"
    "show = ShowOutputsCallback(lambda model: {'grey': torch.zeros(4, 5), 'figure': plt.subplots()[0]})\n"
    "Trainer(model, nn.MSELoss(), optimizer, [show]).train(data, 1)"
]
CURVES = [
    f"{SETUP}from pytorch_accel_lite.callbacks import PlotMetricsCallback\n"
    "Trainer(model, nn.MSELoss(), optimizer, [PlotMetricsCallback()]).train(data, 4)"
]


@pytest.fixture(scope="module")
def executed_notebooks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The cells of each notebook above after it ran, and the folder of theirs."""
    own = {"launched": LAUNCHED, "errors": ERRORS, "tables": TABLES, "curves": CURVES, "pictures": PICTURES}
    notebooks = {name: [nbformat.v4.new_code_cell(source) for source in sources] for name, sources in own.items()}
    for cell in notebooks["errors"]:
        cell.metadata.tags = ["raises-exception"]
    folder = tmp_path_factory.mktemp("notebooks")
    execute_together(notebooks, folder)
    return notebooks, folder


def test_both_notebooks_exist():
    assert len(NOTEBOOKS) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_its_stored_outputs(tmp_path, path):
    """If this fails, run ``make notebooks``."""
    kept = nbformat.read(path, as_version=4)
    again = nbformat.read(path, as_version=4).cells
    execute_together({path.stem: again}, tmp_path)
    for cell, old in zip(again, kept.cells, strict=True):
        assert shown_by(cell) == shown_by(old), cell.source
    assert sum(shown_by(cell).count("a picture") for cell in kept.cells) >= 2
    text = path.read_text()
    for word in ("Traceback", "stderr", "widget-view", "/tmp", "site-packages"):
        assert word not in text


def test_a_run_is_one_table_in_a_notebook(executed_notebooks):
    whole, alone, failed, bars = executed_notebooks[0]["tables"]
    for cell, epochs, end in ((whole, 3, "Trained 3 epochs, 15 updates"), (failed, 3, "Failed (AssertionError)")):
        (shown,) = [output for output in cell.outputs if output.output_type == "display_data"]
        html = shown.data["text/html"]
        assert html.count("<tr>") == 1 + epochs
        assert html.count("<b>") == 1
        assert "<progress" not in html
        assert end in html
        assert re.search(rf"{epochs}/\d +\d", shown.data["text/plain"])
        printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        assert "mine 3\n" in printed
        assert "train_loss_epoch" not in printed
    assert {output.output_type for output in alone.outputs} == {"stream"}  # no table, and a bar only for long runs
    assert len([output for output in bars.outputs if output.output_type != "stream"]) <= 1


def test_errors_and_checks_fit_a_screen_of_a_notebook(executed_notebooks):
    of_forward, of_argument, check = executed_notebooks[0]["errors"]
    for cell, line in ((of_forward, "return self.second(self.first(x))"), (of_argument, "trainer.train(data, -3)")):
        (error,) = [output for output in cell.outputs if output.output_type == "error"]
        shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
        assert line in shown
        assert len(re.findall(r"pytorch_accel_lite/|modules/module\.py", shown)) == (cell is of_argument)  # the check
        assert len(shown.splitlines()) < 40
    assert "the model's 'second'," in "".join(of_forward.outputs[-1].traceback)
    (shown,) = [output.data["text/html"] for output in check.outputs if output.output_type == "execute_result"]
    assert re.search(r'<th [^>]*>runs</th>\s*<td [^>]*color: #\w+"><b>\u2717</b> failed</td>', shown)
    assert re.search(r"<summary>\d+ not applicable</summary>", shown)


def test_curves_are_drawn_in_one_place_of_a_notebook(executed_notebooks):
    (cell,) = executed_notebooks[0]["curves"]
    (shown,) = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    picture = base64.b64decode(shown["data"]["image/png"])
    assert picture == (executed_notebooks[1] / "curves" / "metrics.png").read_bytes()  # the last


def test_outputs_that_are_pictures_are_shown_once_in_a_notebook(executed_notebooks):
    (cell,) = executed_notebooks[0]["pictures"]
    shown = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    folder = executed_notebooks[1] / "pictures" / "outputs"
    written = [(folder / f"{name}-000005.png").read_bytes() for name in ("grey", "figure")]
    assert [*map(base64.b64decode, shown)] == written


def test_processes_that_a_notebook_launches_show_their_progress(executed_notebooks):
    launched, again = executed_notebooks[0]["launched"]
    printed = "".join(output.text for output in launched.outputs if output.output_type == "stream")
    assert printed.count("Starting epoch 3/3") == 1
    assert "Trained 3 epochs" in printed
    (told,) = again.outputs
    assert "an earlier cell has created a Trainer or an Accelerator" in told.text
