"""The layers of the package, and its public interface."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from pytorch_accel_lite import RunHistory, Trainer
from pytorch_accel_lite.extension_names import NEEDED, OFFERED
from pytorch_accel_lite.run.run import TrainerLike
from tests import interface
from tests.launching import ROOT
from tests.repository.package_files import FILES, PACKAGE, PUBLIC_PATHS, parsed

pytestmark = pytest.mark.xdist_group("parsed")  # the files are parsed once

#: What the facade consists of: it may import extensions, each file an extension once.
FACADE = {
    "pytorch_accel_lite",
    "pytorch_accel_lite.__main__",
    "pytorch_accel_lite.registered_extensions",
    "pytorch_accel_lite.trainer",
    "pytorch_accel_lite.callbacks",
    "pytorch_accel_lite.checkpoint",
    "pytorch_accel_lite.data",
    "pytorch_accel_lite.optimizers",
    "pytorch_accel_lite.schedulers",
    "pytorch_accel_lite.schedulers.cosine_scheduler",
    "pytorch_accel_lite.schedulers.wsd_scheduler",
}
#: From the bottom up: each imports only those before it. Other files re-export, or are for extensions alone.
LAYERS = (
    "extension_names", "base", "distributed", "optimizers", "schedulers", "data", "run", "checkpoint.disk",
    "checkpoint.models", "checkpoint.states", "checkpoint", "steps", "loop.guards", "loop", "callbacks",
    "registered_extensions", "trainer_methods", "trainer",
)  # fmt: skip
#: So that editors know what an event is passed.
EXCEPTIONS = {("pytorch_accel_lite.run.events", "pytorch_accel_lite.trainer")}


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """Return our modules that a file imports anywhere, also for typing, and whether that is in a function."""
    tree = parsed(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {id(node) for each in functions for node in ast.walk(each) if isinstance(node, ast.ImportFrom)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name if name in FILES else str(node.module), id(node) in inner) for name in names]
    return tuple(found)


@cache
def edges() -> frozenset[tuple[str, str]]:
    found = {(name, imported) for name, path in FILES.items() for imported, _ in imports(path)}
    return frozenset(found - EXCEPTIONS)


def layer_of(module: str) -> str:
    """The layer that a module is in, or else its folder or file in the package."""
    first, second = [*module.split(".")[1:], "", ""][:2]
    inner = f"{first}.{second}"
    return inner if inner in {*LAYERS, *PUBLIC_PATHS} else first


def test_a_layer_imports_only_layers_below_it():
    climbing = [
        (name, imported)
        for name, imported in edges()
        if layer_of(name) in LAYERS
        and not extension(imported)
        and layer_of(imported) not in LAYERS[: LAYERS.index(layer_of(name)) + 1]
    ]
    assert climbing == []
    assert {layer_of(name) for name in FILES} - {*LAYERS} <= {
        "",
        "__main__",
        "extensions",
        "extension_tools",
    } | PUBLIC_PATHS


def test_no_layer_imports_what_only_users_do():
    """The ``__init__.py`` of a layer is for users: it also imports extensions."""
    facades = {f"{PACKAGE.name}.{layer}" for layer in ("callbacks", "checkpoint", "data", "optimizers", "schedulers")}
    importing = [edge for edge in edges() if edge[1] in facades and layer_of(edge[0]) in LAYERS[:-1]]
    assert importing == []


def test_no_files_import_each_other_in_a_circle():
    graph = {name: {imported for other, imported in edges() if other == name} for name in FILES}
    while graph:
        leaves = {name for name, imported in graph.items() if not imported & graph.keys()}
        assert leaves, f"these import each other: {sorted(graph)}"
        graph = {name: imported for name, imported in graph.items() if name not in leaves}


def test_our_own_modules_are_imported_at_the_top_of_files():
    assert [(name, imported) for name, path in FILES.items() for imported, late in imports(path) if late] == []


def test_no_two_files_have_one_name():
    names = Counter(path.name for path in FILES.values() if not path.name.startswith("__"))
    assert {name for name, count in names.items() if count > 1} <= {"placeholders.py", "experiment.py"}


def extension(module: str) -> str:
    """The folder of an extension that a module is in, if any."""
    return module.split(".")[2] if layer_of(module) == "extensions" and module.count(".") > 1 else ""


def test_no_two_files_begin_with_the_same_sentence():
    sentences: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        first = (ast.get_docstring(parsed(path)) or str(path)).splitlines()[0]
        assert first not in sentences, f"{path} and {sentences[first]} begin alike: {first}"
        sentences[first] = path


def test_only_the_facade_names_extensions():
    importing = {name for name, path in FILES.items() for other, _ in imports(path) if extension(other)}
    public = {f"{PACKAGE.name}.{path}" for path in PUBLIC_PATHS}
    assert {name for name in importing if not extension(name)} <= FACADE | public


def names_from_the_package(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each module of the package from which a file imports names, and these."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE.name}."):
            yield str(node.module), [alias.name for alias in node.names]


def test_extensions_use_only_what_users_can_import():
    """Of the package, they import names of the public paths, as a program of a user does.

    Of each other, they import nothing, unless an extension is written with the public names of another one.
    """
    public = {*PUBLIC_PATHS, "callbacks", "checkpoint", "data", "optimizers", "schedulers"}
    public -= {"checking", "experiment"}  # of extensions
    for name, path in FILES.items():
        for module, names in names_from_the_package(path) if extension(name) else ():
            if layer_of(module) in public:
                assert module == f"{PACKAGE.name}.{layer_of(module)}", (path, module)
                assert {*names} <= {*importlib.import_module(module).__all__}, path
            elif extension(module) in NEEDED.get(extension(name), ()):
                assert module == f"{PACKAGE.name}.extensions.{extension(module)}", (path, module)
                assert {*names} <= {*importlib.import_module(module).__all__}, path
            elif extension(module) != extension(name):
                assert (module, names[0]) == (f"{PACKAGE.name}.trainer", "Trainer"), path


def test_extensions_use_no_private_names_of_the_core():
    """Ruff finds private names of other objects, but lets the core call methods that users override (SLF001)."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["flake8-self"]
    ours = {name for name in settings["extend-ignore-names"] if hasattr(Trainer, name) or hasattr(RunHistory, name)}
    assert "_increment_epoch" in ours
    for name, path in FILES.items():
        for node in ast.walk(parsed(path)) if extension(name) else ():
            if isinstance(node, ast.Attribute) and not re.fullmatch(r"self|super\(.*\)", ast.unparse(node.value)):
                assert node.attr not in ours, (path, node.lineno)


def test_only_the_loop_uses_what_is_the_loops_own():
    """``Run.loop`` is for ``loop/`` alone."""
    for name, path in FILES.items():
        if not name.startswith(f"{PACKAGE.name}.loop."):
            assert not re.search(r"\brun\.loop\.", path.read_text()), path


def leading_parameters(method: Callable[..., object]) -> list[tuple[str, object, object, object]]:
    """The parameters after ``self``, without ``*args`` and ``**kwargs``: name, kind, default and annotation."""
    _, *parameters = inspect.signature(method).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [(p.name, p.kind, p.default, p.annotation) for p in named]


def test_trainer_like_has_the_signatures_of_trainer():
    """It may leave out the last parameters; the others have the names, defaults and types of ``Trainer``."""
    for name, method in vars(TrainerLike).items():
        if inspect.isfunction(method) and not name.startswith("__"):
            known = leading_parameters(method)
            assert known == leading_parameters(getattr(Trainer, name))[: len(known)], name
            returned = inspect.signature(method).return_annotation
            assert returned == inspect.signature(getattr(Trainer, name)).return_annotation, name
        elif isinstance(method, property):
            assert isinstance(vars(Trainer)[name], property), name


@pytest.mark.extension(*OFFERED)
def test_the_public_interface_equals_interface_txt():
    """After an intended change, run ``python -m tests.interface``."""
    assert list(interface.lines()) == interface.FILE.read_text().splitlines()


@pytest.mark.extension(*OFFERED)
def test_names_offered_are_those_that_the_facade_imports():
    """After a change, run ``python -m tests.interface``."""
    assert interface.offered() == OFFERED


def test_internals_has_the_first_sentence_of_each_extension():
    rows = (ROOT / "docs" / "internals.md").read_text()
    for path in PACKAGE.glob("extensions/*/__init__.py"):
        sentence = (ast.get_docstring(parsed(path)) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
        assert f"| `{path.parent.name}/` | {sentence.rstrip('.')} |" in rows, path


def test_internals_names_existing_files():
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", (ROOT / "docs" / "internals.md").read_text())
    assert len(named) > 50
    deleted = tuple(f"extensions/{name}/" for name in OFFERED if not (PACKAGE / "extensions" / name).exists())
    missing = [path for path in named if not (PACKAGE / path).exists() and not (ROOT / path).exists()]
    assert [path for path in missing if not path.startswith(deleted)] == []


def test_docstrings_have_sections_rather_than_fields():
    """As ``help()`` shows them as they are."""
    field = re.compile(r"^ *:(?:param|type|ivar|cvar|returns?|rtype|raises)\b.*?:", re.MULTILINE)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, kinds) and (found := field.search(ast.get_docstring(node) or "")):
                pytest.fail(f"{path.name}: {found[0]} should be in a section, such as Args:, Returns: or Raises:")


def test_each_test_file_has_a_docstring_and_no_long_name():
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        assert text.startswith('"""') or path.name == "__init__.py", path
        assert max(map(len, re.findall(r"def (test_\w+)", text)), default=0) <= 60, path


def test_no_test_file_imports_another():
    """What several of them share is in a helper, see ``tests/README.md``."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imported = f"{getattr(node, 'module', '')}.{'.'.join(alias.name for alias in node.names)}"
                assert not re.search(r"\btest_", imported), (path, node.lineno)


def test_the_readme_of_the_tests_names_each_helper():
    tests = ROOT / "tests"
    named = set(re.findall(r"`(\w+\.py)`", (tests / "README.md").read_text()))
    assert named == {path.name for path in tests.glob("*.py")} - {"__init__.py"}


def test_attribute_comments_have_one_marker():
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"#:.*#:", path.read_text()), path
