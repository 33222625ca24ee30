"""The classes and functions that an experiment names by their paths, and whether they can be the parts they name."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from accelerate import Accelerator
from torch import nn

from pytorch_accel_lite.callbacks import TrainerCallback
from pytorch_accel_lite.experiment.yaml_files import Document, ExperimentError
from pytorch_accel_lite.trainer import Trainer
from pytorch_accel_lite.utils import suggest

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_STANDARD_LIBRARY = os.path.realpath(sysconfig.get_path("stdlib"))
# Where a class is looked for that is named without its module.
_MODULES = {
    "loss_func": ("torch.nn", "torch.nn.functional"),
    "optimizer": ("torch.optim",),
    "scheduler": ("torch.optim.lr_scheduler", "pytorch_accel_lite.schedulers"),
    "trainer": ("pytorch_accel_lite",),
    "accelerator": ("accelerate",),
    "callbacks": ("pytorch_accel_lite.callbacks",),
}


def import_path(document: Document, key: str, path: Any) -> Any:
    """Return the class or function that a key names by its dotted path; those of torch and ours by name alone.

    :raises ExperimentError: if there is none
    """
    where = document.place(key)
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ExperimentError(f"{where}={path!r} must be the path of a class or a function, such as my_module.MyClass.")
    module_name, _, name = path.rpartition(".")
    if not module_name:
        return _named(where, name, _MODULES.get(key.partition(".")[0], ()))
    module = _module(where, module_name)
    if not hasattr(module, name):
        hint = suggest(name, dir(module))
        raise ExperimentError(f"{where}={path!r}: the module {module_name!r} has no {name!r}.{hint}")
    thing = getattr(module, name)
    if not callable(thing) or not hasattr(thing, "__qualname__"):  # which instances lack, a partial for example
        raise ExperimentError(f"{where}={path!r} must be a class or a function, not {type(thing).__name__}.")
    return thing


def _named(where: str, name: str, modules: Sequence[str]) -> Any:
    matches = [importlib.import_module(module) for module in modules]
    for module in matches:
        if callable(getattr(module, name, None)):
            return getattr(module, name)
    names = [word for module in matches for word in getattr(module, "__all__", dir(module)) if word[0] != "_"]
    looked = f"is not in {' or '.join(modules)}." if modules else "has no module."
    raise ExperimentError(
        f"{where}={name!r} {looked}{suggest(name, names)} Write the module of your own classes too: my_module.{name}."
    )


def _module(where: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # by the module itself, of another
        raise ExperimentError(
            f"{where}: there is no module {error.name!r}. Modules of your own are looked for beside the file, in the "
            f"folder that you are in, {os.getcwd()}, and in PYTHONPATH."
        ) from error


def full_name(thing: Any) -> str:
    """Return the shortest path by which a class or a function can be imported."""
    name: str = thing.__qualname__
    names = thing.__module__.split(".")
    for length in range(1, len(names)):
        shorter = ".".join(names[:length])
        if getattr(sys.modules.get(shorter), name, None) is thing:
            return f"{shorter}.{name}"
    return f"{thing.__module__}.{name}"


# ------------------------------------------------------------------------------------------------------- kinds


def _has_steps(kind: type) -> bool:
    return hasattr(kind, "step") or issubclass(kind, (Mapping, Sequence))  # which hold several


# What each part must be, and whether the instances of a class are.
_NEEDED: dict[str, tuple[str, Callable[[type], bool]]] = {
    "model": ("a torch.nn.Module", lambda kind: issubclass(kind, nn.Module)),
    "loss_func": ("a loss function", lambda kind: issubclass(kind, Callable)),  # type: ignore[arg-type]
    "optimizer": ("an optimizer, with step()", _has_steps),
    "scheduler": ("a scheduler, with step()", _has_steps),
    "data": ("a dataset", lambda kind: hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")),
    "callbacks": ("a TrainerCallback", lambda kind: issubclass(kind, TrainerCallback)),
    "trainer": ("a pytorch_accel_lite.Trainer", lambda kind: issubclass(kind, Trainer)),
    "accelerator": ("an accelerate.Accelerator", lambda kind: issubclass(kind, Accelerator)),
}


def check_kinds(document: Document, parts: Mapping[str, Any]) -> None:
    """Check the classes and functions of all parts, without calling them.

    A class must be of the kind that its part needs. A function must not be one of Python's standard library, nor be
    annotated to return something else; what it returns is not known otherwise.

    :raises ExperimentError: if one cannot be what its part needs
    """
    for key, thing in parts.items():
        section = key.partition(".")[0]
        what, fits = _NEEDED[section]
        if section == "data" and _reads_itself(parts["trainer"]):
            fits = callable
        if reason := _misfit(thing, fits, section == "loss_func"):
            wanted = f"{what}, or a function that returns one" if section != "loss_func" else what
            raise ExperimentError(f"{document.place(key)} must be {wanted}, not {reason}.")


def _reads_itself(trainer: Any) -> bool:
    """Whether a trainer may read its data in a way of its own, so that they may be anything."""
    names = ("create_train_dataloader", "create_eval_dataloader")
    return any(getattr(trainer, name, None) is not getattr(Trainer, name) for name in names)


def _misfit(thing: Any, fits: Callable[[type], bool], is_called_later: bool) -> str:
    """Return why a class or a function cannot be what is needed; an empty text if it can.

    :param is_called_later: whether a function is needed itself, rather than what it returns
    """
    if inspect.isclass(thing):
        return "" if fits(thing) else f"the class {thing.__qualname__}"
    if _is_of_standard_library(thing):
        return f"{thing.__qualname__}() of Python's standard library"
    try:
        returned = typing.get_type_hints(thing).get("return", Any)
    except (NameError, TypeError, AttributeError):  # imported for type checkers only
        return ""
    kinds = typing.get_args(returned) if typing.get_origin(returned) in (Union, types.UnionType) else [returned]
    if is_called_later or any(_may_fit(typing.get_origin(kind) or kind, fits) for kind in kinds):
        return ""
    annotation = inspect.formatannotation(returned).replace("NoneType", "None")
    return f"what {thing.__qualname__}() is annotated to return: {annotation}"


def _may_fit(kind: Any, fits: Callable[[type], bool]) -> bool:
    is_open = kind in (Any, object) or not inspect.isclass(kind) or getattr(kind, "_is_protocol", False)
    return is_open or fits(kind)


def _is_of_standard_library(function: Any) -> bool:
    module = str(getattr(function, "__module__", ""))
    file = getattr(sys.modules.get(module), "__file__", None) or _STANDARD_LIBRARY  # built-in modules have none
    return module.partition(".")[0] in sys.stdlib_module_names and os.path.realpath(file).startswith(_STANDARD_LIBRARY)
