"""The page of a run: users' names unchanged, and outputs of the model."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch

from pytorch_accel_lite.callbacks import RunLogCallback, ShowOutputsCallback
from pytorch_accel_lite.extensions.reports.run_page import TEMPLATES
from pytorch_accel_lite.plotting import Column, render
from tests.small_models import make_data, make_trainer, train


def test_markdown_shows_names_as_they_are():
    table = [Column("a|b", ["<b>", "`x`", "$y$", "[l](u)"])]
    outputs = [{"update": 1, "texts": {"o": "a\n````\nb"}}]
    empty: dict[str, Any] = dict.fromkeys(("lead", "reason", "command", "error", "how_to_resume"), "")
    empty |= {"facts": (), "results": (), "pictures": {}}
    empty |= {"name": "# x\n<i>", "outcome": "ended", "outputs": outputs, "tables": {"T": table}, "details": {}}
    page = render(TEMPLATES / "run.md", **empty)
    assert "| a\\|b |" in page
    assert all(cell in page for cell in ("| &lt;b> |", "| \\`x\\` |", "| \\$y\\$ |", "| [l\\](u) |"))
    assert "# # x &lt;i>" in page
    assert "``````text\na\n````\nb\n``````\n" in page


def test_outputs_are_on_the_page_the_latest_first(tmp_path):
    show = ShowOutputsCallback(lambda model: {"<b>prompt</b>": "text & more"}, "4 updates")
    train(make_trainer([show, RunLogCallback(tmp_path)]), epochs=4)
    record = json.loads((tmp_path / "run.json").read_text())
    assert [shown["update"] for shown in record["outputs"]] == [4, 8, 12]
    html = (tmp_path / "summary.html").read_text()
    assert html.index("Update 12") < html.index("Update 4")
    assert "&lt;b&gt;prompt&lt;/b&gt;" in html
    assert "text &amp; more" in html
    assert "text & more" in (tmp_path / "summary.md").read_text()


def test_pictures_are_on_the_page_unless_their_files_are_gone(here):
    show = ShowOutputsCallback(lambda model: {"half <1>": torch.eye(6), "text": "some"}, "6 updates")
    trainer = train(make_trainer([show, RunLogCallback("log")]), epochs=4)
    html = Path("log/summary.html").read_text()
    data = base64.b64encode(Path("outputs/half <1>-000012.png").read_bytes()).decode()
    assert f'<img src="data:image/png;base64,{data}" alt="half &lt;1&gt;">' in html
    assert "![picture](../outputs/half%20%3C1%3E-000012.png)" in Path("log/summary.md").read_text()
    assert "<pre>some</pre>" in html
    assert json.loads(Path("log/run.json").read_text())["outputs"] == show.shown
    Path("outputs/half <1>-000006.png").unlink()
    trainer.evaluate(make_data())  # writes the page again
    assert Path("log/summary.html").read_text().count("<img") == 1
