"""The documentation is correct: its code runs, its commands exist, its reference is complete."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib import pyplot

import pytorch_accel_lite
from pytorch_accel_lite import callbacks
from pytorch_accel_lite.run import events
from tests.launching import CAN_SHARD, HAS_MUON, ROOT, SOAK, WarmPython, some_of
from tests.pages import BLOCK, blocks, write_files

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md")),
    *sorted(page for folder in ("", "api", "examples", "schemes") for page in (ROOT / "docs" / folder).glob("*.md")),
]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
#: A block, and the packages that a comment above it names, without which it is not run.
RUN = re.compile(r"^(?:<!-- needs ([\w ]+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


WITH_CODE = [page for page in PAGES if blocks(page, "python") and page.parent.name != "schemes"]

NEEDS = {"sharding.md": CAN_SHARD, "optimizers.md": HAS_MUON}
CODE = [pytest.param(page, marks=NEEDS.get(page.name, ()), id=page.name) for page in WITH_CODE]


@pytest.mark.programs
@pytest.mark.parametrize("page", CODE)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", WarmPython)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    write_files(page, tmp_path)
    run_the_code(page)


def run_the_code(page: Path) -> None:
    namespace = {"__name__": "docs"}
    text = page.read_text()
    for block in RUN.finditer(text):
        needed, code = block.groups(default="")
        if all(map(importlib.util.find_spec, needed.split())):
            lines_before = "\n" * text.count("\n", 0, block.start(2))  # tracebacks have the lines of the page
            exec(compile(lines_before + code, str(page), "exec"), namespace)


SCHEMES = [page for page in PAGES if page.parent.name == "schemes"]
QUICK = [page for page in some_of(SCHEMES) if page.stem not in ("detection", "simclr")]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def pictures_in(page: Path) -> list[str]:
    return re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.thorough] * (page.stem != "kfold"))
        for page in (SCHEMES if SOAK else QUICK)
    ],
    ids=lambda page: page.stem,
)
def test_a_scheme_gives_the_results_that_its_page_shows(page, tmp_path, monkeypatch, capsys):
    if page.stem == "detection":
        pytest.importorskip("torchvision")
        pytest.importorskip("pycocotools")
    monkeypatch.chdir(tmp_path)
    run_the_code(page)
    pyplot.close("all")
    shown = "".join(blocks(page, "text")).splitlines()
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert shown
    for line in shown:
        # Other processors round differently, and training amplifies that.
        [found] = [numbers_in(other) for other in printed if NUMBER.sub("#", other) == NUMBER.sub("#", line)]
        assert found == pytest.approx(numbers_in(line), rel=0.25, abs=0.05), line
    assert {picture.name for picture in tmp_path.glob("*.png")} == set(pictures_in(page))


def numbers_in(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(line)]


def test_the_code_of_a_page_fits_its_column():
    for page in PAGES:
        for language, code in BLOCK.findall(page.read_text()):
            wide = [line for line in code.splitlines() if len(line) > 88]
            assert language in ("text", "console") or wide == [], page


def test_the_pages_with_code_are_found():
    assert {page.name for page in WITH_CODE} >= {"README.md", "quickstart.md", "callbacks.md", "data.md", "loop.md"}


def test_the_first_pages_are_short():
    """The README argues in one screen; the landing page installs, trains in a dozen lines, and shows a picture."""
    why = (ROOT / "README.md").read_text().partition("\n## Why\n")[2].partition("\n## ")[0]
    assert len(why.splitlines()) <= 24
    landing = ROOT / "docs" / "index.md"
    [program] = blocks(landing, "python")
    assert len([line for line in program.splitlines() if line]) == 12
    assert "pip install" in blocks(landing, "console")[0]
    assert "```{image} curves.png" in landing.read_text()


#: Pages that show the same training by another library and by this one, and what the other needs.
SIDE_BY_SIDE = {
    "coming_from_a_loop.md": "torch",
    "coming_from_lightning.md": "lightning",
    "coming_from_transformers.md": "transformers",
    "switching.md": "pytorch_accelerated",
}


def numbers(code: str) -> set[float]:
    """The settings in a program: its numbers, without the zeros of counters and indices."""
    constants = (node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    return {float(value) for value in constants if type(value) in (int, float)} - {0.0}


@pytest.mark.programs
@pytest.mark.parametrize("page", SIDE_BY_SIDE)
def test_both_columns_of_a_page_train_the_same(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared, ours, *_ = blocks(ROOT / "docs" / page, "python")
    [theirs] = blocks(ROOT / "docs" / page, "py")
    assert numbers(theirs) == numbers(ours)
    pytest.importorskip(SIDE_BY_SIDE[page])
    found = []
    for code in (theirs, ours):
        namespace: dict[str, Any] = {"__name__": "docs"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(shared + code, page, "exec"), namespace)
        found.append(namespace)
    for name, limit in (("accuracy", 0.05), ("loss", 0.1)):
        if name in found[1]:
            assert abs(found[0][name] - found[1][name]) < limit


def check_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_the_commands_of_the_readme_exist():
    commands = [line for page in PAGES for code in blocks(page, "console") for line in code.splitlines()]
    assert [line for line in commands if line.startswith("pip install")]
    for command in commands:
        for target in re.findall(r"^make ([\w-]+)", command):
            check_target(target)
        for file in re.findall(r"\w+/[\w/]*\w+\.py", command):
            assert (ROOT / file).is_file(), command
        assert (
            shutil.which(command.split()[0]) or "=" in command or command.split()[0] in ("accelerate", "cd", "torchrun")
        )


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.name)
def test_mentioned_make_targets_and_files_exist(page):
    for target in re.findall(r"`make ([\w-]+)", page.read_text()):
        check_target(target)
    for file in re.findall(r"`((?:pytorch_accel_lite|tests|docs|examples|benchmarks|\.ci)/[\w/.]*)`", page.read_text()):
        assert (ROOT / file).exists(), file


def test_ci_jobs_run_existing_targets():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow[True].keys() >= {"push", "pull_request", "schedule"}  # YAML 1.1 reads "on" as true
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands.count(".ci/run") == 1
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    for command in commands:
        if command.startswith("make "):
            check_target(command.removeprefix("make "))
        files = [word for word in command.split() if word.startswith("tests/")]
        assert all((ROOT / file).exists() for file in files), command


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_issue_forms_are_valid(form):
    content = yaml.safe_load(form.read_text())
    assert content["name"]
    assert content["description"]
    ids = [field["id"] for field in content["body"]]
    assert len(ids) == len(set(ids))
    for field in content["body"]:
        assert field["type"] in ("textarea", "dropdown", "checkboxes")
        assert field["attributes"]["label"]
        assert bool(field["attributes"].get("options")) == (field["type"] != "textarea")


def test_dependabot_changes_bounds_only_if_necessary():
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    strategies = {update["package-ecosystem"]: update.get("versioning-strategy") for update in updates}
    assert strategies == {"pip": "increase-if-necessary", "github-actions": None}


@pytest.mark.extension("plots")
def test_every_picture_can_be_redrawn():
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["PICTURES"]
    assert sorted(path.name for path in (ROOT / "docs").glob("*.png")) == pictures
    drawn = [name for page in SCHEMES for name in pictures_in(page)]
    assert sorted(path.name for path in (ROOT / "docs" / "schemes").glob("*.png")) == sorted(drawn)


def test_no_page_has_the_name_of_a_page_that_sphinx_writes():
    assert {page.stem for page in PAGES if page.parent.name == "docs"}.isdisjoint({"search", "genindex"})


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            # The build copies the notebooks into the folder of the pages.
            path = ROOT / "examples" / target if target.startswith("notebooks/") else page.parent / target
            assert path.exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("name", sorted({*pytorch_accel_lite.__all__, *callbacks.__all__}))
def test_every_public_name_is_in_the_reference(name):
    assert any(re.search(rf"\b{name}\b", page.read_text()) for page in (ROOT / "docs" / "api").glob("*.md"))


@pytest.mark.parametrize("name", [name for name in callbacks.__all__ if re.fullmatch(r"(?!Trainer)\w+Callback", name)])
def test_every_callback_is_in_the_table_of_callbacks_in_one_line(name):
    rows = (ROOT / "docs" / "builtin_callbacks.md").read_text().splitlines()
    [row] = [row for row in rows if row.startswith(f"| {{py:class}}`~pytorch_accel_lite.callbacks.{name}`")]
    shown = re.sub(r"\]\([^)]*\)", "", row.split(" | ")[1])
    assert len(shown) <= 90


def test_the_table_of_events_lists_each_with_its_keywords():
    lines = (ROOT / "docs" / "callbacks.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `on_")]
    shown = [(row[0].strip("| `"), tuple(re.findall(r"`(\w+)`", row[1])) if len(row) > 2 else ()) for row in rows]
    assert shown == [(event, events.keywords_of(event)) for event in events.EVENTS]


def test_attributes_of_a_run_have_their_own_docstrings():
    described = {name: value.__doc__ or "" for name, value in vars(pytorch_accel_lite.Trainer).items()}
    assert [name for name, text in described.items() if "attrgetter" in text] == []
    assert "current batch" in described["batch_indices"]


def test_no_file_names_the_machine_it_was_made_on():
    for page in PAGES:
        assert str(ROOT) not in page.read_text()
