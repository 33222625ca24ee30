"""Completion in shells: a script that knows commands, options and values, so that no TAB has to start Python."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import get_args

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import TrainerCallback
from pytorch_accel_lite.extensions.experiment.experiment import create_parser
from pytorch_accel_lite.extensions.experiment.help_pages import Option
from pytorch_accel_lite.extensions.experiment.importing import known_classes
from pytorch_accel_lite.schedulers import ScheduleName, SchedulerBase
from pytorch_accel_lite.utils import import_extra

#: The name of the installed command, which the script completes.
PROGRAM = "pytorch-accel-lite"
SHELLS = ("bash", "zsh")
# Words that may stand in place of a path.
_WEIGHTS = ("best", "last")
_STATES = ("latest",)
_PATHS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("file", "a", "b", "experiment", "path", "runs", "page", "save_dir", "program", "output_dir"), ()),
    "weights": _WEIGHTS,
    "resume": _STATES,
    "train.resume_from": _STATES,
}


def completion_script(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    shell: str,
    file: str | None = None,
) -> str:
    """Return a script for a shell that completes commands, their options, and values that can be known.

    Args:
        parser: the parser of the command line
        commands: the parsers of its commands; this function adds the options of experiments to them
        shell: one of ``SHELLS``
        file: an experiment whose own options are completed, too; without a file, only the options that all experiments
            have

    Raises:
        ImportError: if shtab is not installed
    """
    shtab = import_extra("shtab", "cli", "Completion in shells")
    parser.prog = PROGRAM
    for name, command in commands.items():
        if command.get_default("takes_experiment"):
            has_method = name == "test" or hasattr(Trainer, name)  # not if its extension is missing
            options = create_parser(file, tool=name if has_method else None).options()
            _add_options(command, options)
        for action in command._actions:
            if action.dest in _PATHS:
                vars(action)["complete"] = _paths(_PATHS[action.dest])
            elif action.dest == "help" and action.nargs == "?":
                action.choices = [*dict.fromkeys(option.group for option in options)]
    script = str(shtab.complete(parser, shell))
    # A plus is special in the regular expressions of zsh.
    return script.replace("--callbacks+[", r"--callbacks\+[") if shell == "zsh" else script


def _add_options(command: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Add the options of an experiment to a command."""
    add = command.add_argument
    for key, names in _named_classes().items():
        add(f"--{key}", choices=names, help="a class or a function")
    add("--callbacks+", choices=known_classes("callbacks", TrainerCallback), action="append", help="add a callback")
    add("--resume", help="resume from a training state")
    for option in options:
        if option.key == "overwrite":
            add("--overwrite", action="store_true", help=option.text)
        elif option.key != "callbacks":
            add(f"--{option.key}", choices=_values(option.kind) or None, help=option.text.replace("%", "%%"))


def _named_classes() -> dict[str, list[str]]:
    """Return the parts of an experiment whose classes may be given by name alone, and these names."""
    return {
        "model": [],
        "loss_func": [name for name in known_classes("loss_func", nn.Module) if name.endswith("Loss")],
        "optimizer": known_classes("optimizer", Optimizer),
        "scheduler": [*get_args(ScheduleName), *known_classes("scheduler", LRScheduler, SchedulerBase)],
    }


def _values(kind: str) -> list[str]:
    """Return the possible values of a type, or an empty list if they cannot be listed."""
    literals = re.findall(r"'([^']+)'", "".join(re.findall(r"Literal\[(.*?)\]", kind)))
    return literals + (["true", "false"] if "bool" in kind.split(" | ") else [])


def _paths(words: Sequence[str]) -> dict[str, str | dict[str, str]]:
    """Return the completion of a value that is a path or one of some words, as shtab expects it."""
    name, listed = "_".join(["", *words, "or", "files"]), " ".join(words)
    bash = f'{name}() {{ compgen -W "{listed}" -- "$1"; compgen -f -- "$1"; }}'
    zsh = f"{name}() {{ compadd -- {listed}; _files; }}"
    return {"bash": name, "zsh": name, "preamble": {"bash": bash, "zsh": zsh}}
