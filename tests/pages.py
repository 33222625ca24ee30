"""The code blocks of the documentation's pages."""

from __future__ import annotations

import re
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks of a page that begin with the name of a file, in a comment."""
    for _, code in BLOCK.findall(page.read_text()):
        if named := re.match(r"# (\w+\.(?:py|yaml))\n", code):
            (folder / named[1]).write_text(code)
