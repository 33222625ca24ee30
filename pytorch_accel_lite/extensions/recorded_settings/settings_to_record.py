"""The settings of a run that change what it computes, by name.

Settings that only change its speed, its paths or its output are left out. So are its length and its number of
processes, which a resumed run may change.
"""

from __future__ import annotations

import os

from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.data import Source
from pytorch_accel_lite.extending import JsonObject, TrainerCallback, TrainerLike, TrainerRunConfig
from pytorch_accel_lite.extension_tools.arguments_and_errors import arguments_of, is_overridden, may_differ
from pytorch_accel_lite.extension_tools.data_and_batches import dataset_of
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import named_callbacks
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    Options,
    initial_options,
    is_created,
    parts_of_optimizer,
)
from pytorch_accel_lite.extension_tools.states_and_files import saved_optimizers
from pytorch_accel_lite.extension_tools.texts_and_pages import to_number
from pytorch_accel_lite.extensions.data_fingerprints import fingerprint_of
from pytorch_accel_lite.extensions.recorded_settings.described_values import (
    class_name,
    describe_object,
    describe_setting,
    parameter_names,
)

#: The key of the fingerprints of the data.
DATA = "data"


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


def _of_train(trainer: TrainerLike) -> dict[str, str]:
    config = trainer.run_config
    return {name: describe_setting(getattr(config, name, None)) for name in TrainerRunConfig.compared_settings()}


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
    return set(getattr(optimizer, "defaults", {})) - parameter_names(type(optimizer))  # type: ignore[arg-type]


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
    return {f"{name}.{key}" if key else name: describe_object(module, 1) for key, module in value.named_modules()}


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
