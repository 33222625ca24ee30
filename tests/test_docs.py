"""What the documentation says is true: its code runs, its commands exist, its reference is complete."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import pytorch_accel_lite
from pytorch_accel_lite import callbacks, events
from tests.launching import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


WITH_CODE = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), namespace)


def test_the_pages_have_code():
    assert {page.name for page in WITH_CODE} >= {"README.md", "quickstart.md", "callbacks.md", "data.md", "loop.md"}


def test_the_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    commands = [line for page in PAGES for code in blocks(page, "console") for line in code.splitlines()]
    assert commands[:2] == ["make demo", "make test"]
    for command in commands:
        for target in re.findall(r"^make (\w+)", command):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), command
        for file in re.findall(r"\S+/\S+\.py", command):
            assert (ROOT / file).is_file(), command
        assert shutil.which(command.split()[0]) or "=" in command or command.split()[0] in ("accelerate", "torchrun")


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("name", sorted({*pytorch_accel_lite.__all__, *callbacks.__all__}))
def test_every_public_name_is_in_the_reference(name):
    assert re.search(rf"\b{name}\b", (ROOT / "docs" / "api.md").read_text())


@pytest.mark.parametrize("name", [name for name in callbacks.__all__ if re.fullmatch(r"(?!Trainer)\w+Callback", name)])
def test_every_callback_is_in_the_table_of_callbacks(name):
    assert f"`{name}`" in (ROOT / "docs" / "callbacks.md").read_text()


@pytest.mark.parametrize("event", events.EVENTS)
def test_every_event_is_in_the_table_of_events(event):
    assert f"`{event}`" in (ROOT / "docs" / "callbacks.md").read_text()


def test_no_file_names_the_machine_it_was_made_on():
    for page in PAGES:
        assert str(ROOT) not in page.read_text()
