"""The programs of the first pages pass strict type checkers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, only_with_soak
from tests.pages import blocks

pytest.importorskip("mypy")

BESIDE = Path(sys.executable).parent  # where the extra installs it, whatever PATH says
FOUND = (shutil.which(name, path=where) for name in ("pyright", "basedpyright") for where in (None, str(BESIDE)))
CHECKER = next(filter(None, FOUND), None)
PAGES = {
    "readme": ROOT / "README.md",
    "index": ROOT / "docs" / "index.md",
    "quickstart": ROOT / "docs" / "quickstart.md",
}
#: What an editor should know about a trainer, beside what the pages use.
USES = """
from collections.abc import Sequence
from typing import Any, assert_type

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import RunHistory, Trainer

data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
model = nn.Linear(2, 1)
trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
trainer.train(data, num_epochs=1, eval_dataset=data)
assert_type(trainer.run_history, RunHistory)
assert_type(trainer.run_history.plot(), Figure)
assert_type(trainer.run_history["eval_loss_epoch"], Sequence[Any])
assert_type(trainer.progress.epoch, int)
assert_type(trainer.check(data).ok, bool)
for batch in trainer.predict_iter(data):
    print(batch)
"""


@pytest.fixture(scope="module")
def page_programs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The code of each page as a program."""
    folder = tmp_path_factory.mktemp("programs")
    sources = {name: "\n".join(blocks(page, "python")) for name, page in PAGES.items()} | {"uses": USES}
    for name, source in sources.items():
        (folder / f"{name}_page.py").write_text(source)
    return sorted(folder.iterdir())


@only_with_soak
@pytest.mark.programs
@pytest.mark.timeout(900)
def test_the_programs_of_the_first_pages_pass_mypy(page_programs):
    """With the settings of this repository, whose cache serves both: strict."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, page_programs)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.timeout(900)
@pytest.mark.skipif(CHECKER is None, reason="needs pyright, or basedpyright of the extra test")
def test_the_programs_of_the_first_pages_pass_pyright(page_programs):
    """In its strict mode, except for a function of torch whose argument has no type."""
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "reportMissingTypeStubs": False}
    folder = page_programs[0].parent
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [str(CHECKER), "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert found["summary"]["filesAnalyzed"] == len(page_programs)
    messages = [f"{Path(it['file']).name}: {it['message']}" for it in found["generalDiagnostics"]]
    assert [it for it in messages if 'Type of "manual_seed" is partially unknown' not in it] == []


@pytest.mark.slow
@pytest.mark.xdist_group("jedi")  # whose cache on the disk is not safe for several processes at once
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("trainer.", {"train", "evaluate", "predict", "save_model", "run_history", "progress", "stop_reason"}),
        ("trainer.run_history.", {"plot", "to_dataframe", "get_metric_values"}),
        ("trainer.check(data).", {"ok", "failures"}),
        ("trainer.find_lr(data).", {"suggestion", "plot"}),
        ("from pytorch_accel_lite.callbacks import Early", {"EarlyStoppingCallback"}),
    ],
    ids=["trainer", "history", "check", "find_lr", "import"],
)
def test_an_editor_completes_existing_names(typed, offered):
    """By jedi, which notebooks and many editors ask."""
    jedi = pytest.importorskip("jedi")
    found = {it.name for it in jedi.Script(f"{USES}\n{typed}").complete()}
    assert offered <= found
    assert not {"fit", "global_step"} & found  # names of other libraries
