"""Each extension can be deleted, and all of them: the core imports and, with SOAK=1, passes mypy and its tests."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from pytorch_accel_lite.extension_names import ARGUMENTS, NEEDED, OFFERED, VARIABLES
from tests.launching import ROOT, SOAK, EarlyFork, environment, forget, run_forked, some_of

PACKAGE = ROOT / "pytorch_accel_lite"
EXTENSIONS = sorted(path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py"))
LEFT_OUT = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "_build")
#: Files of the facade that have nothing else, or hardly.
WITHOUT_OTHERS = {("experiment", "experiment"), ("checking", "checking")}
#: Tests that read the whole package.
OF_THE_PACKAGE = [
    "tests/repository/test_structure.py",
    "tests/repository/test_callback_names.py",
    "tests/repository/test_imports.py",
    "tests/base/test_escaped_names.py",
]
#: Asks for names that have gone.
PROGRAM = """
import os, sys
from unittest import mock
import pytorch_accel_lite
from pytorch_accel_lite import Trainer, callbacks, checkpoint, data, ema, finetuning, integrations, optimizers, plotting
from pytorch_accel_lite import schedulers, utils
from pytorch_accel_lite.schedulers import cosine_scheduler, wsd_scheduler
import torch

trainer = Trainer(torch.nn.Linear(1, 1), None, None)
modules = {"callbacks": callbacks, "data": data, "ema": ema, "integrations": integrations, "plotting": plotting}
modules |= {"checkpoint": checkpoint, "finetuning": finetuning, "optimizers": optimizers, "utils": utils}
modules |= {"schedulers": schedulers, "schedulers.wsd_scheduler": wsd_scheduler}
modules |= {"schedulers.cosine_scheduler": cosine_scheduler}
owners = {"": pytorch_accel_lite, "Trainer": trainer, **modules}
for qualified in sys.argv[1:]:
    owner, _, name = qualified.rpartition(".")
    try:
        if "=" in name:
            setting, _, value = name.partition("=")
            arguments = {} if setting.isupper() else {setting: int(value)}
            with mock.patch.dict(os.environ, {setting: value} if setting.isupper() else {}):
                Trainer(torch.nn.Linear(1, 1), None, None, **arguments)
        elif owner == "Trainer":
            getattr(trainer, name)
        else:
            exec(f"from {owners[owner].__name__} import {name}")
    except (AttributeError, ImportError, ValueError) as error:
        print(error)
"""
pytestmark = [pytest.mark.programs, pytest.mark.soak]


def facade(package: Path, extension: str) -> list[Path]:
    """The files of the facade that import an extension."""
    rooms = ("callbacks", "checkpoint", "data", "optimizers", "schedulers")
    files = [*package.glob("*.py"), *(package / room / "__init__.py" for room in rooms)]
    # Paths of pytorch-accelerated.
    files += [package / "schedulers" / f"{name}_scheduler.py" for name in ("cosine", "wsd")]
    return [path for path in files if re.search(rf"extensions(\.| import ){extension}\b", path.read_text())]


def delete(copy: Path, extension: str) -> list[str]:
    """Delete an extension with its tests and its lines in the facade; return the names that the package loses."""
    package = copy / PACKAGE.name
    for path in facade(package, extension):
        if (extension, path.stem) in WITHOUT_OTHERS:
            path.unlink()
        else:
            path.write_text(without(extension, path.read_text()))
    shutil.rmtree(package / "extensions" / extension)
    shutil.rmtree(copy / "tests" / "extensions" / extension)
    settings = [name for name, owner in (ARGUMENTS | VARIABLES).items() if owner == extension]
    return [*OFFERED[extension], *(f"{name}=2" for name in settings)]


def without(extension: str, text: str) -> str:
    """A file of the facade without the lines that import an extension, or name what they import."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        name = f"{node.module}.{node.names[0].name}." if isinstance(node, ast.ImportFrom) else ""
        if f".extensions.{extension}." in name:
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
            for imported in (alias.asname or alias.name for alias in node.names):
                # In a list of names, one a line or all in one; what a class takes from it; a command.
                named = rf'^ +("{imported}",|\w+ = {imported}\b.*)\n|"\w*": {imported}\b,? ?'
                in_a_line = rf'(?<=[\[ ])"{imported}"(, |(?=\]))'
                lines = [re.sub(in_a_line if line.startswith("__all__") else named, "", line) for line in lines]
    return "".join(lines)


def say_what_is_missing(copy: Path, names: list[str]) -> None:
    """In a fork, run the program with the package of a copy."""
    forget(PACKAGE.name)
    sys.path.insert(0, str(copy))
    os.chdir(copy)
    sys.argv[1:] = names
    exec(compile(PROGRAM, "<code>", "exec"), {"__name__": "__main__"})
    assert Path(sys.modules[PACKAGE.name].__file__ or "").is_relative_to(copy)


def run(copy: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment(PYTHONPATH=str(copy)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def with_dependents(name: str) -> list[str]:
    """An extension and those that cannot be without it, also if they need it through another one."""
    found = [name]
    for each in found:
        found += [other for other in EXTENSIONS if each in NEEDED.get(other, ()) and other not in found]
    return found


@pytest.mark.parametrize(
    "deleted",
    some_of(some_of(some_of(with_dependents(name) for name in EXTENSIONS)))
    + ([EXTENSIONS] if len(EXTENSIONS) > 1 else []),
    ids=lambda names: "all" if names == EXTENSIONS else names[0],
)
def test_the_core_works_without_extensions(tmp_path, tmp_path_factory, deleted):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    lost_of = {extension: delete(copy, extension) for extension in deleted}
    lost = [name for names in lost_of.values() for name in names]
    done = run_forked(partial(say_what_is_missing, copy, lost), kind=EarlyFork)
    assert done.returncode == 0, done.stdout
    assert [line.partition(", which is not installed")[0] for line in done.stdout.splitlines()] == [
        f"{name} belongs to the extension {extension!r}" for extension, names in lost_of.items() for name in names
    ]
    if SOAK:
        run(copy, "-m", "mypy", "--cache-dir", str(tmp_path_factory.getbasetemp() / "mypy"))
        # The tests of the core pass without any: with one deleted, those of the other extensions run.
        tests = ["tests"] if deleted == EXTENSIONS else ["tests/extensions", *OF_THE_PACKAGE]
        quick = "not processes and not programs and not slow"
        run(copy, "-m", "pytest", *tests, "-n", "2", "-m", quick, "-p", "no:cacheprovider", "-o", "timeout=3600")
