"""Errors about missing extras name a command that works for any installation."""

from __future__ import annotations

import html
import sysconfig
from pathlib import Path

import pytest

from tests.launching import run_code

# As metadata have it, whether installed from an index, a clone, a git address or a file.
METADATA = """Metadata-Version: 2.4
Name: pytorch-accel-lite
Version: 9.9
Requires-Dist: torch>=2.0
Provides-Extra: plot
Requires-Dist: matplotlib>=3.8; extra == "plot"
Requires-Dist: pillow; python_version > "3" and extra == 'plot'
Provides-Extra: tensorboard
Requires-Dist: tensorboard>=2.16; extra == "tensorboard"
Provides-Extra: plotter
Requires-Dist: plotter; extra == "plotter"
"""

SCRIPT = """
import sys
from pathlib import Path

import torch

from pytorch_accel_lite import InMemoryRunHistory, Trainer
from pytorch_accel_lite.callbacks import RunLogCallback, TrackerCallback
from tests.launching import forget

forget("matplotlib", "PIL", installed=False)
forget("tensorboard")
# Nothing is installed but our dependencies, and perhaps our metadata: not even as a checkout is that pip has installed.
gone = ["site-packages", "dist-packages"]
kept = [path for path in sys.path if Path(path).name not in gone and not [*Path(path).glob("*.egg-info")]]
sys.path[:] = [sys.argv[1], *kept]
history = InMemoryRunHistory()
history.update_metric("loss", 1)
data = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.ones(4, 1))


def train(*callbacks):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model, torch.nn.MSELoss(), optimizer, callbacks=callbacks).train(data, 1, data, per_device_batch_size=2)


for attempt in (history.plot, lambda: TrackerCallback("tensorboard")):
    try:
        attempt()
    except ImportError as error:
        print(error)
log = Path(sys.argv[2])
train(RunLogCallback(log))
print(*[page.read_text() for page in log.rglob("*.html")])
"""


def messages(folder: Path, metadata: str | None) -> list[str]:
    site = folder / "site"
    site.mkdir()
    for library in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(library).iterdir():
            if "pytorch_accel_lite" not in path.name and path.name.partition(".")[0] != "tensorboard":
                (site / path.name).symlink_to(path)
    if metadata:
        (site / "pytorch_accel_lite-9.9.dist-info").mkdir()
        (site / "pytorch_accel_lite-9.9.dist-info" / "METADATA").write_text(metadata)
    output = run_code(SCRIPT, str(site), str(folder / "log"))
    return [line for line in output.splitlines() if "pip install" in line]


@pytest.mark.programs
@pytest.mark.extension("plots", "reports", "trackers")
@pytest.mark.parametrize(
    ("metadata", "plot", "tensorboard"),
    [
        (METADATA, "'matplotlib>=3.8' pillow", "'tensorboard>=2.16'"),
        (None, "matplotlib", "tensorboard"),  # a checkout on PYTHONPATH
    ],
    ids=["installed", "not installed"],
)
def test_errors_name_what_to_install(tmp_path, metadata, plot, tensorboard):
    plotting, tracking, log = messages(tmp_path, metadata)
    assert plotting == f"plot() needs matplotlib. Install it with: pip install {plot}"
    assert tracking.startswith("tracker='tensorboard' (installed: ")
    assert tracking.endswith(f") needs tensorboard. Install it with: pip install {tensorboard}")
    assert f"<p>For curves: <code>pip install {html.escape(plot).replace('&#x27;', '&#39;')}</code></p>" in log
