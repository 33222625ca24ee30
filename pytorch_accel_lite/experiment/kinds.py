"""Checking, before anything is called, that what a part names can be what the part needs."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from accelerate import Accelerator
from torch import nn

from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.inspection import is_ours
from pytorch_accel_lite.experiment.signatures import type_hints
from pytorch_accel_lite.experiment.yaml_files import Document, ExperimentError
from pytorch_accel_lite.trainer import Trainer

_STANDARD_LIBRARY = os.path.realpath(sysconfig.get_path("stdlib"))


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
        if section == "data" and _has_own_loaders(parts["trainer"]):
            fits = _is_anything
        if reason := _misfit(thing, fits, section == "loss_func"):
            wanted = f"{what}, or a function that returns one" if section != "loss_func" else what
            raise ExperimentError(f"{document.place(f'{key}.class_path')} must be {wanted}, not {reason}.")


def _has_own_loaders(trainer: Any) -> bool:
    """Whether a trainer may read its data in a way of its own, so that they may be anything."""
    names = ("create_train_dataloader", "create_eval_dataloader")
    return not inspect.isclass(trainer) or not all(is_ours(getattr(trainer, name, None)) for name in names)


def _is_anything(kind: type) -> bool:
    return True


def _misfit(thing: Any, fits: Callable[[type], bool], is_called_later: bool) -> str:
    """Return why a class or a function cannot be what is needed; an empty text if it can.

    :param is_called_later: whether a function is needed itself, rather than what it returns
    """
    if inspect.isclass(thing):
        return "" if fits(thing) else f"the class {thing.__qualname__}"
    if _is_of_standard_library(thing):
        return f"{thing.__qualname__}() of Python's standard library"
    returned = type_hints(thing).get("return", Any)
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
