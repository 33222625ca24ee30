"""The documentation site: no warnings, a working search, and lines that fit their columns."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sphinx

from tests.launching import ROOT, launch

pytestmark = [
    pytest.mark.programs,
    pytest.mark.slow,
    pytest.mark.xdist_group("site"),
    # Extensions of Sphinx use what it deprecates; its warnings of the pages are errors all the same.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]

#: The words that people search for, and the page that has to come first.
SEARCHES = {
    "install": "installation",
    "resume": "training_states",
    "checkpoint": "training_states",
    "multi-gpu": "distributed",
    "metrics": "metrics",
    "early stopping": "stopping",
    "learning rate": "finding_settings",
    "freeze": "finetuning",
    "callbacks": "callbacks",
    "tensorboard": "logging",
    "out of memory": "failures",
    # What a newcomer types.
    "train": "quickstart",
    "two gpus": "distributed",
    "stop early on accuracy": "stopping",
    "log to tensorboard": "logging",
    "write a callback": "callbacks",
    "freeze layers": "finetuning",
    "find a learning rate": "finding_settings",
    "what is slow": "monitoring",
    "mixed precision": "loop",
    "bf16": "loop",
    "wandb": "logging",
    "w&b": "logging",
    "trackio": "logging",
    "own numbers": "metrics",
    "two inputs": "inputs_and_losses",
    "custom loss": "inputs_and_losses",
    "hugging face": "hugging_face",
    "tokenizer": "hugging_face",
    "export": "exporting",
    "onnx": "exporting",
    "load the best model": "exporting",
    "predict": "exporting",
    "slurm": "clusters",
    "reinforcement learning": "without_a_dataset",
    "gradient accumulation": "loop",
    "dataloader": "data",
    "bit by bit": "comparing_with_a_loop",
    # One thing under several names, and one name of two things.
    "bfloat16": "loop",
    "half precision": "loop",
    "weights & biases": "logging",
    "warmup": "schedulers",
    "warm-up": "schedulers",
    "class weights": "recipes",
    "imbalanced": "recipes",
    "label smoothing": "recipes",
    "checkpointing": "training_states",
    "gradient checkpointing": "recipes",
    "activation checkpointing": "recipes",
    "ema": "ema",
    "exponential moving average": "ema",
    "momentum teacher": "momentum_teachers",
    "target network": "momentum_teachers",
}
DOCS = ROOT / "docs"
BUILT = DOCS / "_build" / "html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def is_newest(file: Path) -> bool:
    """Whether a file is newer than all sources of the pages."""
    if not file.exists():
        return False
    patterns = ["*.md", "docs/**/*", "examples/**/*", "pytorch_accel_lite/**/*.py"]
    made = ("docs/_build/", "docs/notebooks/")
    files = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    sources = [name for name in files if not name.startswith(made) and "/." not in name and "__pycache__" not in name]
    return file.stat().st_mtime > max((ROOT / name).stat().st_mtime for name in sources)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of ``make docs``, built if they are missing or outdated."""
    folder = tmp_path_factory.mktemp("site")
    if is_newest(BUILT / ".finished"):
        shutil.copytree(BUILT, folder, dirs_exist_ok=True)
        return folder
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "auto", "-b", "html"]
    done = launch([*sphinx, "docs", str(folder)], warm=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser_findings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a browser finds on the pages and in the search."""
    if BROWSER is None:
        pytest.skip("There is no Chromium or Chrome to look at the pages with")
    site: Path = request.getfixturevalue("site")
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    pages = [page for page in pages if not page.startswith(("search.html", "genindex", "_static"))]
    assert len(pages) > 40
    (site / "probe.json").write_text(json.dumps({"pages": pages, "widths": [1440], "searches": list(SEARCHES)}))
    shutil.copy(ROOT / "tests" / "probe.html", site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        dumped = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1500,1000", "--dump-dom",
             "--virtual-time-budget=120000", f"http://127.0.0.1:{server.server_port}/probe.html"],
            capture_output=True, text=True, timeout=200, check=True,
        ).stdout  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    found = re.search(r'<pre id="found">(.*?)</pre>', dumped, re.DOTALL)
    return json.loads(html.unescape(found[1]))


def test_no_line_of_code_and_no_table_is_wider_than_its_column(browser_findings):
    assert browser_findings["done"]
    assert browser_findings["wide"] == {}


@pytest.mark.parametrize("words", SEARCHES)
def test_the_search_finds_the_right_page_first(browser_findings, words):
    if sphinx.version_info < (8,):
        pytest.skip("older versions of Sphinx rank the pages differently")
    assert browser_findings["first"][words].split("#")[0] == f"{SEARCHES[words]}.html"
