"""The settings of a run, as training states record them; ``settings_comparison.py`` compares them.

Settings are recorded if they change what a run computes. Settings that only change its speed, its paths or its output
are left out. So are its length and its number of processes, which a resumed run may change.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from types import CodeType
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.base.constructor_calls import arguments_of
from pytorch_accel_lite.base.modules import class_of, unsharded_class
from pytorch_accel_lite.base.paths import is_place
from pytorch_accel_lite.base.reprs import short_repr
from pytorch_accel_lite.base.text import to_number
from pytorch_accel_lite.base.types import JsonObject
from pytorch_accel_lite.base.user_code import is_overridden
from pytorch_accel_lite.checkpoint.models.trained_objects import trained_objects
from pytorch_accel_lite.data.fingerprint import fingerprint_of
from pytorch_accel_lite.data.loader_choice import dataset_of
from pytorch_accel_lite.data.sources import Source
from pytorch_accel_lite.optimizers.operations import is_created, parts_of_optimizer
from pytorch_accel_lite.optimizers.rates import Options, initial_options
from pytorch_accel_lite.run.callback_handler import named_callbacks
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import TrainerLike

#: Settings of ``TrainerRunConfig`` that change what a run computes.
_OF_TRAIN = (
    "train_per_device_batch_size",
    "gradient_accumulation_steps",
    "gradient_clip_value",
    "gradient_clip_norm",
    "scheduler_interval",
    "scheduler_metric",
    "eval_every_n_epochs",
    "evaluate_every",
    "mixed_precision",
)
#: Names of arguments for devices, parts of a job, and data.
_ELSEWHERE = re.compile(
    r"(.*_)?(devices?|dtype|rank|replicas|world_size|epoch|verbose)|data_source|dataset|mixture|generator"
)
#: Marks the code of a function: the Python version of the bytecode, and a checksum.
CODE = re.compile(r" #(\d+\.\d+)-[0-9a-f]{8}")
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})
_DEEPEST = 4
#: The key of the fingerprints of the data.
DATA = "data"


def may_differ(name: str) -> bool:
    """Return whether a setting, by its name, may differ in a resumed run, as a place or a device may."""
    return is_place(name) or _ELSEWHERE.fullmatch(name) is not None


def saved_optimizers(trainer: TrainerLike) -> dict[str, Optimizer]:
    """Return the optimizers in training states by name: the trainer's ``optimizer``, and optimizers in attributes."""
    named = {"optimizer": trainer.optimizer, **trained_objects(trainer)}
    return {name: owner for name, owner in named.items() if isinstance(owner, torch.optim.Optimizer)}


# ----------------------------------------------------------------------------------------------- recording


def record_settings(trainer: TrainerLike, reads_data: bool = True) -> JsonObject:
    """Return the settings of the current run by name, as texts, and the fingerprints of its data.

    Args:
        reads_data: whether to read a few samples
    """
    run = trainer.current_run
    options = run.schedule.initial_options
    return {
        "trainer": class_name(type(trainer)),
        "seed": repr(trainer.seed),
        **_of_train(trainer),
        **describe_optimizers(trainer, options),
        **_schedule(trainer),
        **_modules("loss_func", trainer.loss_func),
        **_modules("model", trainer.get_model(keep_torch_compile=False)),
        **_callbacks(trainer),
        **_order(trainer),
        DATA: {name: fingerprint_of(data) for name, data in datasets_of_run(trainer).items()} if reads_data else {},
    }


def settings_text(trainer: TrainerLike) -> str:
    """Return the settings for a training state of the current run. A run that saves states has recorded them."""
    if not trainer.accelerator.is_main_process:  # the main process writes the state
        return ""
    recorded = trainer.current_run.recorded_settings
    return json.dumps(record_settings(trainer, reads_data=False) if recorded is None else recorded)


def _of_train(trainer: TrainerLike) -> dict[str, str]:
    config = trainer.run_config
    return {name: describe_setting(getattr(config, name, None)) for name in _OF_TRAIN}


def describe_optimizers(trainer: TrainerLike, initial: Options | None = None) -> dict[str, str]:
    """Return the options of all parameter groups, with the rates before any schedule.

    Args:
        initial: the options, with these rates, of the trainer's optimizer, if known
    """
    result = {}
    for name, optimizer in saved_optimizers(trainer).items() if is_created(trainer.optimizer) else ():
        known = initial if initial and name == "optimizer" else initial_options(optimizer)
        running = {
            option for part in parts_of_optimizer(optimizer).values() or [optimizer] for option in _running(part)
        }
        for number, (group, rates) in enumerate(zip(optimizer.param_groups, known, strict=False)):
            label = name if len(optimizer.param_groups) == 1 else f"{name}.param_groups[{number}]"
            for option, value in {**group, **rates}.items():
                is_initial = option.startswith("initial_")
                if not (is_initial or option in running or option in ("params", "param_names")):
                    result[f"{label}.{option}"] = describe_setting(to_number(value), option)
    return result


def _running(optimizer: Optimizer) -> set[str]:
    """Return the keys in an optimizer's groups that are its own progress rather than arguments."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return set(getattr(optimizer, "defaults", {})) - _parameters(type(optimizer))  # type: ignore[arg-type]


def _schedule(trainer: TrainerLike) -> dict[str, str]:
    scheduler = trainer.scheduler
    if scheduler is None:  # warn_of_other_schedule reports a missing schedule
        return {}
    own = is_overridden(trainer, "create_scheduler")
    return {
        "create_scheduler_fn": class_name(type(scheduler)) if own else describe_setting(trainer.create_scheduler_fn)
    }


def _modules(name: str, value: object) -> dict[str, str]:
    """Return the class and the arguments of each module in a module, or the arguments of a function."""
    if not isinstance(value, nn.Module):
        return {name: describe_setting(value)}
    return {f"{name}.{key}" if key else name: _object(module, 1) for key, module in value.named_modules()}


def _callbacks(trainer: TrainerLike) -> dict[str, str]:
    result: dict[str, str] = {}
    for name, callback in named_callbacks(trainer.callback_handler).items():
        if not callback.affects_training:
            continue
        result[f"callbacks.{name}"] = "stateful" if hasattr(callback, "state_dict") else "used"
        result |= {
            f"callbacks.{name}.{key}": describe_setting(value, key)
            for key, value in _arguments_but_places(callback).items()
        }
    return result


def _arguments_but_places(callback: TrainerCallback) -> dict[str, object]:
    """Return the arguments with which a callback was created, and the defaults of others, without places."""
    try:
        arguments = arguments_of(callback, with_defaults=True)
    except (TypeError, ValueError):
        return {}
    return {
        name: value for name, value in arguments.items() if not may_differ(name) and not isinstance(value, os.PathLike)
    }


def _order(trainer: TrainerLike) -> dict[str, str]:
    """Return the settings for the order of the training samples and for making batches of them."""
    source = getattr(trainer.current_run.data.train_loader, "source", None)
    names = ("sampler", "drop_last", "collate_fn")
    return {f"the loader's {name}": describe_setting(getattr(source, name)) for name in names if hasattr(source, name)}


def datasets_of_run(trainer: TrainerLike) -> dict[str, Source]:
    """Return the datasets of the current run, by the name of their setting."""
    data = trainer.current_run.data
    loaders = {"train_dataset": data.train_loader}
    loaders |= {f"eval_dataset[{name!r}]": loader for name, loader in data.eval_loaders.items()}
    if not data.eval_loaders and data.eval_loader is not None:
        loaders["eval_dataset"] = data.eval_loader
    return {name: dataset_of(getattr(loader, "source", loader)) for name, loader in loaders.items()}


# ---------------------------------------------------------------------------------------- describing a value


def describe_setting(value: object, name: str = "", depth: int = 0) -> str:
    """Return a text that is equal for equal settings, in any process; secrets are hidden.

    Args:
        name: name of the setting, which shows whether it is a secret
    """
    if isinstance(value, (bool, int, float, complex, type(None), np.generic)):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, (str, bytes)):
        text = short_repr(value, name)
        return text if len(value) < 50 else f"{text} ({crc32(repr(value).encode()):08x})"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _array(value)
    if isinstance(value, type):
        return class_name(value)
    if depth >= _DEEPEST:
        return f"{type(value).__name__}(...)"
    if isinstance(value, (Mapping, list, tuple, set, frozenset, range)):
        return _container(value, depth + 1)
    if isinstance(value, partial):
        args = [describe_setting(item, "", depth + 1) for item in value.args]
        args += [f"{key}={describe_setting(item, key, depth + 1)}" for key, item in value.keywords.items()]
        return f"{describe_setting(value.func, '', depth + 1)}({', '.join(args)})"
    return _function(value, depth + 1) if inspect.isroutine(value) else _object(value, depth + 1)


def class_name(kind: type) -> str:
    """Return the name of a class, without the name of a function that defines it."""
    return unsharded_class(kind).__name__


def _array(value: torch.Tensor | npt.NDArray[Any]) -> str:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized or hasattr(value, "device_mesh"):
            return f"tensor{tuple(value.shape)}"
        value = value.detach().to("cpu", torch.float64 if value.is_floating_point() else None).numpy()
    if value.size == 1:
        return repr(value.item())
    return f"array{value.shape} ({crc32(np.ascontiguousarray(value).tobytes()):08x})"


def _container(value: Collection[object], depth: int) -> str:
    if isinstance(value, range):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {describe_setting(item, str(key), depth)}' for key, item in value.items())}}}"
    items = [describe_setting(item, "", depth) for item in [*value][:1000]]
    items = sorted(items) if isinstance(value, (set, frozenset)) else items
    text = ", ".join(items)
    return f"[{text}]" if len(value) < 20 else f"[{len(value)} items] ({crc32(text.encode()):08x})"


def _object(value: object, depth: int) -> str:
    """Describe an object by its class and the attributes that are arguments of the class."""
    kind = class_of(value) if isinstance(value, nn.Module) else type(value)
    if isinstance(value, nn.Module):
        own = {**vars(value), **{name: item for name, item in value._buffers.items() if item is not None}}
    else:
        text = "" if kind.__repr__ is object.__repr__ else repr(value)
        if text and " at 0x" not in text and len(text) < 1000 and "\n" not in text:
            return text
        own = getattr(value, "__dict__", {})
    taken = _parameters(kind)  # type: ignore[arg-type]
    names = [name for name in own if name in taken and not may_differ(name)]
    parts = [f"{name}={describe_setting(own[name], name, depth)}" for name in sorted(names)]
    return f"{kind.__name__}({', '.join(parts)})"


@lru_cache(maxsize=1000)
def _parameters(kind: type) -> set[str]:
    try:
        return set(inspect.signature(kind).parameters)
    except (TypeError, ValueError):  # the class is not written in Python
        return set()


def _function(value: Callable[..., object], depth: int) -> str:
    """Describe a function by its name and, if it is the user's, by its code and its captured variables."""
    function: Any = getattr(value, "__func__", value)
    name = getattr(function, "__name__", type(value).__name__)
    code = getattr(function, "__code__", None)
    if code is None or os.path.realpath(code.co_filename).startswith(_LIBRARIES):
        return name
    around = []
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            around.append(f"{variable}={describe_setting(cell.cell_contents, variable, depth)}")
        except ValueError:  # the variable is not assigned yet
            continue
    defaults = [describe_setting(item, "", depth) for item in function.__defaults__ or ()]
    number = crc32(repr([_code(code), defaults]).encode())
    version = ".".join(map(str, sys.version_info[:2]))
    arguments = f"({', '.join(around)})" if around else ""
    return f"{name}{arguments} #{version}-{number:08x}"


def _code(code: CodeType) -> list[object]:
    constants = [_code(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
    return [code.co_code, constants, code.co_names]
