"""The public interface as text, one signature per line: ``python -m tests.interface`` writes ``interface.txt``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pytorch_accel_lite import extension_tools
from pytorch_accel_lite.base.trainer_help import AttributeElsewhere

FILE = Path(__file__).with_name("interface.txt")
MODULES = (
    "",
    ".callbacks",
    ".data",
    ".schedulers",
    ".optimizers",
    ".finetuning",
    ".checking",
    ".experiment",
    ".extending",
    ".extensions.metrics",
    ".extensions.monitoring",
    ".extensions.profiling",
    ".extensions.progress_bar",
    ".extensions.trials",
    ".integrations",
    ".plotting",
    *(f".extension_tools.{module.name}" for module in pkgutil.iter_modules(extension_tools.__path__)),
)
#: Private by their names, but overridden or read by users of pytorch-accelerated.
PROMISED = {
    "_run_training", "_run_train_epoch", "_run_eval_epoch", "_create_run_config", "_create_accelerator",
    "_create_callback_handler", "_loss_tracker", "_train_dataloader", "_eval_dataloader",
    "_increment_epoch", "_set_epoch",
}  # fmt: skip


def lines() -> Iterator[str]:
    """Yield a line for everything that users can call, override or read."""
    found = {}
    for suffix in MODULES:
        module = importlib.import_module(f"pytorch_accel_lite{suffix}")
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        for name in sorted(getattr(module, "__all__", own)):
            if not name.startswith("_"):
                found[f"pytorch_accel_lite{suffix}.{name}"] = getattr(module, name)
    classes = {value for value in found.values() if inspect.isclass(value)}
    seen = set()
    for name, value in found.items():
        if not inspect.isclass(value):
            is_ours = getattr(value, "__module__", "").startswith("pytorch_accel_lite")
            yield f"{name}{_signature(value) if is_ours else ''}"
        elif value not in seen:
            seen.add(value)
            yield f"class {name}"
            yield from (f"    {line}" for line in _members(value, classes - {value}))


def _members(cls: type, others: set[type]) -> Iterator[str]:
    """Yield the members that a class does not have from another class that is listed too."""
    for name in sorted(set(dir(cls))):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if owner in others or not owner.__module__.startswith("pytorch_accel_lite"):
            continue
        if issubclass(cls, tqdm) and name in vars(tqdm) and not callable(vars(owner)[name]):
            continue  # tqdm sets some on the class of the first bar
        if not name.startswith("_") or name in PROMISED or name == "__init__":
            held = vars(owner)[name]
            if isinstance(held, AttributeElsewhere):
                continue
            yield f"{name}{_signature(held if isinstance(held, property) else getattr(cls, name))}"


def _signature(value: Any) -> str:
    if isinstance(value, property):
        return ""
    try:
        signature = inspect.signature(getattr(value, "__func__", value))
    except (TypeError, ValueError):
        return ""
    plain = []
    for parameter in signature.parameters.values():
        plain.append(parameter.replace(annotation=inspect.Parameter.empty))
    return str(inspect.Signature(plain))


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
