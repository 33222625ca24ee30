"""Built-in callbacks as examples: they import public names only and read documented attributes only.

Of runs, other files of extensions also read only what is documented.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import pytest

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.run.events import events_between
from pytorch_accel_lite.run.run import Run, TrainerLike
from tests.repository.package_files import FILES, PACKAGE, PUBLIC_PATHS, parsed

pytestmark = pytest.mark.xdist_group("parsed")  # the files are parsed once

PUBLIC = ("", "callbacks", "checkpoint", "data", "optimizers", "schedulers", *sorted(PUBLIC_PATHS))
CALLBACKS = [name for name in FILES if name.startswith(f"{PACKAGE.name}.callbacks.")]
OF_EXTENSIONS = [
    name for name in FILES if name.startswith(f"{PACKAGE.name}.extensions.") and name.endswith("_callback")
]
#: In ``experiment``, runs are those that a file has recorded.
IN_EXTENSIONS = [
    name for name in FILES if name.startswith(f"{PACKAGE.name}.extensions.") and ".extensions.experiment" not in name
]
#: What files call the objects whose attributes they read, and how these are documented and typed.
KINDS = {"trainer": TrainerLike, "_trainer": TrainerLike, "run": Run, "_run": Run}


@cache
def exported() -> dict[str, object]:
    """What users can import, by name."""
    found: dict[str, object] = {}
    for path in PUBLIC:
        try:
            module = importlib.import_module(f"{PACKAGE.name}.{path}".rstrip("."))
        except ImportError:  # of an extension that is deleted
            continue
        found |= {name: getattr(module, name) for name in module.__all__}
    return found


@cache
def documented(kind: type) -> set[str]:
    """The attributes of a class that its documentation, or a comment at the attribute, describes."""
    found: set[str] = set()
    if "are arguments of ``Trainer.train" in (kind.__doc__ or ""):
        found |= {*inspect.signature(Trainer.train).parameters}
    for owner in kind.__mro__:
        if not owner.__module__.startswith(PACKAGE.name):
            continue
        found |= {*re.findall(r"^ {4}(\w+):", inspect.getdoc(owner) or "", re.MULTILINE)}
        found |= {*re.findall(r"#:.*\n\s+(?:self\.)?(\w+)", inspect.getsource(owner))}
        found |= {name for name, value in vars(owner).items() if getattr(value, "__doc__", None)}
    return {name for name in found if not name.startswith("_")}


@cache
def type_of(kind: type, attribute: str) -> type | None:
    """The class of an attribute, if it is one of this package."""
    member = getattr(kind, attribute, None)
    read = member.fget if isinstance(member, property) else None
    hint = get_type_hints(read).get("return") if read is not None else get_type_hints(kind).get(attribute)
    for each in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if inspect.isclass(each) and each.__module__.startswith(PACKAGE.name):
            return each
    return None


def reads(tree: ast.AST) -> Iterator[tuple[type, list[str]]]:
    """Yield the chains of attributes that are read from trainers and runs, such as ``data``, ``seed``."""
    for node in ast.walk(tree):
        names: list[str] = []
        part: ast.expr | None = node if isinstance(node, ast.Attribute) else None
        while isinstance(part, ast.Attribute) and part.attr not in ("_trainer", "_run"):
            names.insert(0, part.attr)
            part = part.value
        root = part.attr if isinstance(part, ast.Attribute) else part.id if isinstance(part, ast.Name) else ""
        if names and root in KINDS:
            yield KINDS[root], names


def is_callback(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, TrainerCallback)


@pytest.mark.parametrize("name", CALLBACKS + OF_EXTENSIONS)
def test_each_callback_file_defines_a_callback_or_lists_some(name):
    """What several callbacks share is in a room below, and what one of them uses may be beside it."""
    values = vars(importlib.import_module(name)).values()
    own = [value for value in values if is_callback(value) and value.__module__ == name]
    lists = [value for value in values if isinstance(value, list) and value and all(map(is_callback, value))]
    users = [other for other in CALLBACKS if f"from {name} import" in FILES[other].read_text()]
    assert own or lists or len(users) == 1


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_import_only_what_users_can_import(name):
    public = exported()
    for node in ast.walk(parsed(FILES[name])):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(f"{PACKAGE.name}."):
            continue
        if not str(node.module).startswith(f"{PACKAGE.name}.callbacks."):
            for alias in node.names:
                own = getattr(importlib.import_module(str(node.module)), alias.name)
                assert public.get(alias.asname or alias.name) is own or own == public.get(alias.name), alias.name


def test_extensions_read_only_documented_attributes_of_runs():
    """Of trainers, they read what ``TrainerLike`` has."""
    read = [(name, *found) for name in IN_EXTENSIONS for found in reads(parsed(FILES[name]))]
    for name, kind, names in read:
        if kind is Run:
            assert names[0] in documented(Run), (name, names[0])
            continue
        assert hasattr(TrainerLike, names[0]) or names[0] in get_type_hints(TrainerLike), (name, names[0])
        if names[0] in ("run", "current_run"):
            assert {*names[1:2]} <= documented(Run), (name, names[1])


@pytest.mark.parametrize("name", CALLBACKS + OF_EXTENSIONS)
def test_callbacks_read_only_documented_attributes(name):
    for kind, names in reads(parsed(FILES[name])):
        owner: type | None = kind
        for attribute in names:
            if owner is None:
                break
            assert attribute in documented(Trainer if owner is TrainerLike else owner), f"{owner.__name__}.{attribute}"
            owner = type_of(owner, attribute)


def names_called(function: ast.FunctionDef) -> set[str]:
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in called}


def test_no_callback_stops_a_run_within_a_step():
    """No state could be saved there. A callback notes the stop, and raises it in ``on_train_step_checkpoint``.

    Functions are followed by their names alone, also from one callback to another.
    """
    trees = [parsed(FILES[name]) for name in CALLBACKS + OF_EXTENSIONS]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    stops = {"StopTrainingError", "RunPausedError"}
    while found := {function.name for function in functions if names_called(function) & stops} - stops:
        stops |= found
    assert {"on_training_run_epoch_end", "on_train_step_checkpoint"} <= stops
    assert not stops & {*events_between("on_train_step_start", "on_update_end")}
