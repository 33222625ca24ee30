"""Extensions can be deleted, each and all: the core imports, and with SOAK=1 passes the type checker and its tests."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, SOAK, environment

PACKAGE = ROOT / "pytorch_accel_lite"
EXTENSIONS = sorted(path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py"))
LEFT_OUT = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "_build")
#: Asks for names that have gone.
PROGRAM = """
import sys
import pytorch_accel_lite

for name in sys.argv[1:]:
    try:
        getattr(pytorch_accel_lite, name)
    except AttributeError as error:
        print(error)
"""
pytestmark = [pytest.mark.programs, pytest.mark.soak]


def facade(package: Path, extension: str) -> list[Path]:
    """The files beside the folder of extensions that import one."""
    return [path for path in package.glob("*.py") if f"extensions.{extension}" in path.read_text()]


def delete(copy: Path, extension: str) -> list[str]:
    """Delete an extension with its tests and its lines in the facade; return the names that the package loses."""
    package = copy / PACKAGE.name
    lost: list[str] = []
    for path in facade(package, extension):
        if path.name != "__init__.py":  # a public path, or the command line
            path.unlink()
            continue
        text = path.read_text()
        [line] = re.findall(rf"^from \S+extensions\.{extension} import .*\n", text, re.MULTILINE)
        lost = [alias.name for node in ast.walk(ast.parse(line)) for alias in getattr(node, "names", ())]
        for gone in (line, *(f'    "{name}",\n' for name in lost)):
            text = text.replace(gone, "")
        path.write_text(text)
    shutil.rmtree(package / "extensions" / extension)
    shutil.rmtree(copy / "tests" / "extensions" / extension)
    return lost


def run(copy: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment(PYTHONPATH=str(copy)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize("deleted", [[name] for name in EXTENSIONS] + ([EXTENSIONS] if len(EXTENSIONS) > 1 else []))
def test_the_core_works_without_extensions(tmp_path, deleted):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    lost_of = {extension: delete(copy, extension) for extension in deleted}
    lost = [name for names in lost_of.values() for name in names]
    said = run(copy, "-c", PROGRAM, *lost).splitlines()
    assert [line.partition(", which is not there")[0] for line in said] == [
        f"{name} is of the extension {extension!r}" for extension, names in lost_of.items() for name in names
    ]
    if SOAK:
        run(copy, "-m", "mypy")
        quick = "not processes and not programs and not slow"
        run(copy, "-m", "pytest", "tests", "-n", "2", "-m", quick, "-p", "no:cacheprovider", "-o", "timeout=3600")
