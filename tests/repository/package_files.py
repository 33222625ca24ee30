"""The files of the package, parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.launching import ROOT

PACKAGE = ROOT / "pytorch_accel_lite"
PUBLIC_PATHS = {
    "checking",
    "ema",
    "experiment",
    "extending",
    "finetuning",
    "integrations",
    "placeholders",
    "plotting",
    "run_config",
    "tracking",
    "utils",
    *(f"extension_tools.{path.stem}" for path in (PACKAGE / "extension_tools").glob("[a-z]*.py")),
}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
