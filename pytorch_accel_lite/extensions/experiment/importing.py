"""Importing the classes and functions that an experiment names, and checking their kinds."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import ModuleType
from typing import Any, get_args

from accelerate import Accelerator
from torch import nn

from pytorch_accel_lite.callbacks import TrainerCallback
from pytorch_accel_lite.extensions.experiment.yaml_files import Document, ExperimentError
from pytorch_accel_lite.schedulers import ScheduleName
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import suggest

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# For each key, the modules in which a class is looked up if it is named without its module.
_MODULES = {
    "loss_func": ("torch.nn", "torch.nn.functional"),
    "optimizer": ("torch.optim",),
    "scheduler": ("torch.optim.lr_scheduler", "pytorch_accel_lite.schedulers"),
    "trainer": ("pytorch_accel_lite",),
    "accelerator": ("accelerate",),
    "callbacks": ("pytorch_accel_lite.callbacks",),
}


def import_path(document: Document, key: str, path: Any) -> Any:
    """Return the class or function that a key names by dotted path, or by name alone if torch or this package has it.

    Raises:
        ExperimentError: if there is no such class or function
    """
    where = document.locate(key)
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ExperimentError(f"{where}={path!r} must be the path of a class or a function, such as my_module.MyClass.")
    module_name, _, name = path.rpartition(".")
    if not module_name:
        return _import_named(where, name, _MODULES.get(key.partition(".")[0], ()))
    module = _module(where, module_name)
    if not hasattr(module, name):
        hint = suggest(name, dir(module))
        raise ExperimentError(f"{where}={path!r}: the module {module_name!r} has no {name!r}.{hint}")
    thing = getattr(module, name)
    if not callable(thing) or not hasattr(thing, "__qualname__"):  # instances, such as a partial, have no __qualname__
        raise ExperimentError(f"{where}={path!r} must be a class or a function, not {type(thing).__name__}.")
    return thing


def known_classes(key: str, *kinds: type) -> list[str]:
    """Return the names of classes that may be the value of a key without their module, of given base classes."""
    modules = [importlib.import_module(name) for name in _MODULES[key]]
    things = {name: getattr(module, name) for module in modules for name in _public_names(module)}
    classes = {name: thing for name, thing in things.items() if inspect.isclass(thing) and thing not in kinds}
    return sorted(name for name, thing in classes.items() if issubclass(thing, kinds) and not inspect.isabstract(thing))


def _public_names(module: ModuleType) -> list[str]:
    return [word for word in getattr(module, "__all__", dir(module)) if word[0] != "_"]


def _import_named(where: str, name: str, modules: Sequence[str]) -> Any:
    imported = [importlib.import_module(module) for module in modules]
    for module in imported:
        if callable(getattr(module, name, None)):
            return getattr(module, name)
    names = [word for module in imported for word in _public_names(module)]
    if _MODULES["scheduler"] == modules:
        names = [*get_args(ScheduleName), *names]
    problem = f"is not in {' or '.join(modules)}." if modules else "has no module."
    raise ExperimentError(
        f"{where}={name!r} {problem}{suggest(name, names)} Write the module of your own classes too: my_module.{name}."
    )


def _module(where: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but an import within it failed
        raise ExperimentError(
            f"{where}: there is no module {error.name!r}. Modules of your own are looked for beside the file, in the "
            f"folder that you are in, {os.getcwd()}, and in PYTHONPATH."
        ) from error


def full_name(thing: Any) -> str:
    """Return the path of a class or function: through a module where names are looked up, or else the shortest path."""
    name: str = thing.__qualname__
    for known in chain.from_iterable(_MODULES.values()):
        if known in sys.modules and vars(sys.modules[known]).get(name) is thing:
            return f"{known}.{name}"
    names = thing.__module__.split(".")
    for length in range(1, len(names)):
        shorter = ".".join(names[:length])
        if getattr(sys.modules.get(shorter), name, None) is thing:
            return f"{shorter}.{name}"
    return f"{thing.__module__}.{name}"


# The required base class of each part; optimizers and schedulers come in many forms.
_KINDS: dict[str, Any] = {
    "model": nn.Module,
    "loss_func": Callable,
    "callbacks": TrainerCallback,
    "trainer": Trainer,
    "accelerator": Accelerator,
}


def check_kinds(document: Document, parts: Mapping[str, Any]) -> None:
    """Check that the classes of all parts have the required base class. Functions pass: what they return is unknown.

    Raises:
        ExperimentError: if a class has another base class
    """
    for key, thing in parts.items():
        kind = _KINDS.get(key.partition(".")[0], object)
        if inspect.isclass(thing) and not issubclass(thing, kind):
            name = kind.__qualname__
            raise ExperimentError(
                f"{document.locate(key)} must be a kind of {name}, not the class {thing.__qualname__}."
            )
