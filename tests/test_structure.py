"""The house: which room imports which, and what is loaded with the package."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import interface
from tests.launching import ROOT, run_python

PACKAGE = ROOT / "pytorch_accel_lite"
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    """The part of the package that a module belongs to."""
    return module.split(".")[1] if "." in module else ""


def modules_imported(path: Path) -> Iterator[str]:
    """Yield our modules that a file imports when it runs, anywhere in it."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                for statement in child.orelse:
                    yield from walk(statement)
                continue
            if isinstance(child, ast.ImportFrom) and child.module and child.module.split(".")[0] == PACKAGE.name:
                plain = [f"{child.module}.{alias.name}" for alias in child.names]
                is_package = child.module == PACKAGE.name
                yield from plain if is_package else [child.module]
            yield from walk(child)

    yield from walk(ast.parse(path.read_text()))


def rooms() -> dict[str, set[str]]:
    """What each room imports of the others."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        found.setdefault(parts[0], set()).update(map(room_of, modules_imported(path)))
    return {room: imported - {room} for room, imported in found.items()}


def documented() -> dict[str, set[str]]:
    """The same, as ``docs/internals.md`` has it."""
    text = (ROOT / "docs/internals.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|([^|]*)\|$", text, re.MULTILINE)
    return {room: set(re.findall(r"\w+", imports)) for room, imports in rows}


def test_rooms_import_what_the_map_says():
    assert rooms() == documented()


def test_nothing_imports_in_a_circle():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): set(modules_imported(path))
        for path in FILES
    }
    graph = {name: imported & modules.keys() for name, imported in modules.items()}
    graph["pytorch_accel_lite.callbacks"].discard("pytorch_accel_lite.tools.replay")
    while graph:
        leaves = {name for name, imported in graph.items() if not imported & graph.keys() - {name}}
        assert leaves, f"these import each other: {sorted(graph)}"
        graph = {name: imported for name, imported in graph.items() if name not in leaves}


DEFAULTS = {"advice", "devices", "epochs", "progress", "stopping", "table"}


@pytest.mark.slow
def test_importing_the_package_loads_the_core_and_the_default_callbacks_alone():
    code = "import json, sys, pytorch_accel_lite; print(json.dumps(list(sys.modules)))"
    loaded = {name for name in json.loads(run_python(code)) if name.startswith("pytorch_accel_lite.")}
    assert "pytorch_accel_lite.loops.training" in loaded
    for optional in ("tools", "plotting"):
        assert not [name for name in loaded if name.startswith(f"pytorch_accel_lite.{optional}")]
    callbacks = {name.removeprefix("pytorch_accel_lite.callbacks.") for name in loaded if ".callbacks." in name}
    assert callbacks == DEFAULTS


def test_the_public_interface_is_what_is_written_down():
    """A change is meant, or a mistake: ``python -m tests.interface`` writes it down anew."""
    assert list(interface.lines()) == interface.FILE.read_text().splitlines()


def test_each_test_file_says_what_it_is_about_and_no_name_is_long():
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        assert text.startswith('"""') or path.name == "__init__.py", path
        assert max(map(len, re.findall(r"def (test_\w+)", text)), default=0) <= 90, path
