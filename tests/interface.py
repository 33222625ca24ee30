"""The public interface as text, one signature per line, and the names that extensions add to it.

``python -m tests.interface`` writes ``interface.txt``, and ``OFFERED`` in ``extension_names.py``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pytorch_accel_lite import Trainer, extension_names, extension_tools
from pytorch_accel_lite.base.trainer_names import AttributeElsewhere

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


def offered() -> dict[str, tuple[str, ...]]:
    """Return the names that the facade has from each extension: those of its modules, and of methods of the trainer."""
    package = Path(extension_tools.__file__).parents[1]
    prefix = f"{package.name}.extensions."
    found: dict[str, list[str]] = {path.parent.name: [] for path in package.glob("extensions/*/__init__.py")}
    apart = {"__main__", "registered_extensions", "trainer"}
    apart |= {"checking", "experiment"}  # the public paths of one extension, which are deleted with it
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        for node in ast.parse(path.read_text()).body if module.split(".")[0] not in {*apart, "extensions"} else ():
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(prefix):
                names = [alias.asname or alias.name for alias in node.names]
                found[str(node.module).split(".")[2]] += [f"{module}.{name}".lstrip(".") for name in names]
    for name, value in vars(Trainer).items():
        if str(getattr(value, "__module__", "")).startswith(prefix):
            found[value.__module__.split(".")[2]].append(f"Trainer.{name}")
    return {extension: tuple(sorted(names)) for extension, names in sorted(found.items())}


def _write_offered() -> None:
    """Write ``OFFERED`` as ruff formats it."""
    entries = []
    for extension, names in offered().items():
        quoted = [f'"{name}"' for name in names]
        line = f'    "{extension}": ({", ".join(quoted)}{"," * (len(names) == 1)}),'
        split = "".join(f"        {name},\n" for name in quoted)
        entries.append(line if len(line) <= 120 else f'    "{extension}": (\n{split}    ),')
    path = Path(extension_names.__file__)
    written = "OFFERED: dict[str, tuple[str, ...]] = {\n" + "\n".join(entries) + "\n}\n"
    path.write_text(re.sub(r"OFFERED.*? = {\n.*?\n}\n", written, path.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
    _write_offered()
