"""Checks of the arguments of the trainer and its methods, of datasets and optimizers, before anything else happens."""

from __future__ import annotations

import inspect
import numbers
import os
import sys
from collections.abc import Container, Mapping
from types import NoneType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite.base.arguments import (
    check_choice,
    check_number,
    check_positive_int,
    check_positive_number,
    optional,
    refuse_class,
)
from pytorch_accel_lite.base.display import listed, short_repr
from pytorch_accel_lite.base.missing_extensions import check_environment
from pytorch_accel_lite.base.modules import tensor_parallel_size
from pytorch_accel_lite.base.unknown_names import did_you_mean
from pytorch_accel_lite.base.user_code import is_overridden
from pytorch_accel_lite.base.warnings_and_errors import add_note
from pytorch_accel_lite.data.loader_creation import DEFAULT_BATCH_SIZE, LoaderKwargs, options_of
from pytorch_accel_lite.data.sources import Source, dataset_of, is_loader, is_named, is_prepared
from pytorch_accel_lite.distributed.accelerator import current_process
from pytorch_accel_lite.optimizers.optimizer_parts import TrainerOptimizer, is_created, parts_of_optimizer
from pytorch_accel_lite.run.history import RunHistory
from pytorch_accel_lite.run.intervals import parse_interval
from pytorch_accel_lite.run.notes_and_checks_seam import RUN_CHECKS
from pytorch_accel_lite.run.request_and_config import RunRequest
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.run_data import DataArguments
from pytorch_accel_lite.run.trained_objects import all_optimized_parameters

_COMPILE = (bool, dict), "True, False, or a dict of arguments for torch.compile, such as {'mode': 'max-autotune'}"
#: The types of a trainer's arguments.
_TYPES: dict[str, tuple[Any, str]] = {
    "model": (nn.Module, "a torch.nn.Module"),
    "run_history": ((RunHistory, NoneType), "an instance of RunHistory, or None"),
    "accelerator": ((Accelerator, NoneType), "an accelerate.Accelerator, or None"),
    "compile_model": (_COMPILE[0], f"{_COMPILE[1]}, or 'blocks'"),
    "compile_step": _COMPILE,
}
_SEEDED = "Leave it out and pass Trainer(seed=...): the order of an epoch then follows from that seed and the epoch."
#: What to do instead of setting an option of the ``DataLoaderConfiguration`` that has no effect here.
_INSTEAD_OF_CONFIGURATION = {
    "use_seedable_sampler": _SEEDED,
    "data_seed": _SEEDED,
    "use_stateful_dataloader": "Leave it out: training states hold the position within an epoch. For a stream that "
    "workers read, pass torchdata's StatefulDataLoader.",
    "split_batches": "Leave it out and pass the batch size of one process.",
    "dispatch_batches": "Leave it out: each process reads its share of data that can be indexed or divided; the first "
    "process reads other streams for all.",
}
_SEEDS = 2**32 - 2**20  # leaves enough seeds for a million processes


# ------------------------------------------------------------------------------------------ of a trainer


def check_types(**arguments: object) -> None:
    """Check the types of the arguments of a trainer, which are passed by name."""
    for name, value in arguments.items():
        types, expected = _TYPES[name]
        refuse_class(name, value)
        if not isinstance(value, types):
            order = " The arguments are Trainer(model, loss_func, optimizer)." if name == "model" else ""
            raise TypeError(f"{name}={value!r} must be {expected}.{order}")
        if isinstance(value, dict) and name in ("compile_model", "compile_step"):
            _check_compile_options(name, value)


def _check_compile_options(name: str, options: dict[str, object]) -> None:
    """Check that ``torch.compile`` knows all arguments."""
    known = [*inspect.signature(torch.compile).parameters][1:]
    if name == "compile_model":
        known.append("blocks")
    for option in options:
        if option not in known:
            closest = did_you_mean(str(option), known)
            raise TypeError(f"{name} has the key {option!r}, which is not an argument of torch.compile.{closest}")


def check_constructor(loss_func: object, optimizer: object, seed: object) -> None:
    """Check the loss function, the optimizer and the seed of a trainer, and the environment."""
    check_environment()
    refuse_class("loss_func", loss_func)
    if loss_func is not None and not callable(loss_func):
        hint = "Pass a loss function, such as torch.nn.CrossEntropyLoss()."
        if hasattr(loss_func, "param_groups"):
            hint = "The optimizer comes after it: Trainer(model, loss_func, optimizer)."
        raise TypeError(f"loss_func={short_repr(loss_func)} must be callable, or None. {hint}")
    several = isinstance(optimizer, (Mapping, list, tuple))  # several are checked when they are combined
    is_one = hasattr(optimizer, "param_groups") or (callable(optimizer) and not isinstance(optimizer, nn.Module))
    if optimizer is not None and not several and not is_one:
        raise TypeError(
            f"optimizer={optimizer!r} must be an instance of torch.optim.Optimizer, several in a dict or a list, a "
            "function that makes them from the model's parameters, such as functools.partial(AdamW, lr=1e-3), or None."
        )
    if seed is not None:
        number = int(check_number("seed", seed, numbers.Integral, "an integer, or None"))
        if not 0 <= number < _SEEDS:
            raise ValueError(f"seed={seed!r} must be at least 0 and less than 2**32, as numpy's generator requires.")


def check_mixed_precision(precision: str | None, accelerator: Accelerator | None) -> None:
    """Check that an accelerator has the requested mixed precision, or, before there is one, that the device can.

    On CPUs, Accelerate would compute in fp16 without a gradient scaler. On other devices it raises its own errors.
    """
    if precision is None:
        return
    check_choice("mixed_precision", precision, ("no", "fp16", "bf16", "fp8"))
    if accelerator is None and precision == "fp16" and current_process().device.type == "cpu":
        raise ValueError("mixed_precision='fp16' needs a GPU or a similar device. Pass 'bf16', or 'no', on CPUs.")
    if accelerator is not None and accelerator.mixed_precision != precision:
        raise ValueError(
            f"mixed_precision={precision!r}, but that of the accelerator is {accelerator.mixed_precision!r}. Pass only "
            f"one of them to the trainer: mixed_precision, or Accelerator(mixed_precision={precision!r})."
        )


def check_parallelism(accelerator: Accelerator) -> None:
    """Check that the trainer supports the accelerator's ``parallelism_config``."""
    config = getattr(accelerator, "parallelism_config", None)
    shared = [f"{name}={getattr(config, name)}" for name in ("cp_size", "sp_size") if getattr(config, name, 1) > 1]
    if shared:
        raise ValueError(
            f"The accelerator's parallelism_config has {', '.join(shared)}: several processes would share the samples "
            "of a sequence. Context and sequence parallelism are not supported."
        )
    size = tensor_parallel_size(accelerator)
    if size > 1 and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            f"The accelerator's parallelism_config has tp_size={size} beside FSDP, which Accelerate cannot combine "
            "(accelerate issue 3729). Let the model come sharded: load it with transformers' "
            "distributed_config=DistributedConfig(tp_size=..., fsdp_size=...), or call parallelize_module and then "
            "fully_shard in parallelize_model(mesh); pass an Accelerator without an FSDP plugin."
        )


# ------------------------------------------------------------------------------------------- of a training run


def check_resume_from(resume_from: object) -> None:
    """Check that a state to resume from is named."""
    if resume_from is not None and not isinstance(resume_from, (str, os.PathLike)):
        raise TypeError(
            f"resume_from={resume_from!r} must be 'latest', for the newest state, the directory or URL of a state, or "
            "None for a new run."
        )


def check_training(optimizer: TrainerOptimizer, accelerator: Accelerator, request: RunRequest) -> None:
    """Check the arguments of a training run."""
    if optimizer is None:
        raise ValueError("optimizer=None: train() needs an optimizer. Pass one to the trainer.")
    refuse_class("optimizer", optimizer)  # a callback may have assigned one
    if request.num_epochs is None and request.max_num_train_steps is None:
        raise ValueError("num_epochs=None and max_num_train_steps=None: train() needs one of them.")
    _check_accelerator(accelerator)
    optional(check_positive_int, "num_epochs", request.num_epochs)
    optional(check_positive_int, "max_num_train_steps", request.max_num_train_steps)
    optional(check_positive_number, "gradient_clip_value", request.gradient_clip_value)
    optional(check_positive_number, "gradient_clip_norm", request.gradient_clip_norm)
    if isinstance(request.gradient_accumulation_steps, Mapping):
        _check_accumulation("gradient_accumulation_steps", request.gradient_accumulation_steps)
    else:
        check_positive_int("gradient_accumulation_steps", request.gradient_accumulation_steps)
    check_positive_int("eval_every_n_epochs", request.eval_every_n_epochs)
    if request.evaluate_every is not None:
        parse_interval("evaluate_every", request.evaluate_every)
        if request.eval_every_n_epochs != 1:
            raise ValueError(
                f"evaluate_every={request.evaluate_every!r} is instead of eval_every_n_epochs="
                f"{request.eval_every_n_epochs}: pass only one of them."
            )
    interval, metric = request.scheduler_interval, request.scheduler_metric
    check_choice("scheduler_interval", interval, ("update", "epoch"))
    if metric is not None and not isinstance(metric, str):
        raise TypeError(f"scheduler_metric={metric!r} must be the name of a metric, or None.")
    if metric is not None and interval != "epoch":
        raise ValueError(
            f"scheduler_metric={metric!r}: metrics are recorded in evaluations. Pass scheduler_interval='epoch' too."
        )


def _check_accumulation(name: str, steps: Mapping[int, int]) -> None:
    """Check numbers of batches in an update that change after numbers of updates."""
    for first, size in steps.items():
        check_number(f"a key of {name}", first, numbers.Integral, "a number of updates")
        check_positive_int(f"{name}[{first!r}]", size)
    if min(steps, default=-1) != 0:
        raise ValueError(
            f"{name}={dict(steps)!r} must begin with 0, such as {{0: 1, 1000: 2}}: one batch in an update, and two "
            "after 1000 updates."
        )


def _check_accelerator(accelerator: Accelerator) -> None:
    """Refuse settings of an accelerator that the trainer has arguments of its own for, or that have no effect."""
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"The accelerator has gradient_accumulation_steps={accelerator.gradient_accumulation_steps}. "
            "Leave it at 1 there and pass gradient_accumulation_steps to train() instead."
        )
    for name, instead in _INSTEAD_OF_CONFIGURATION.items():
        value = getattr(accelerator.dataloader_config, name)
        if value not in (None, False):
            raise ValueError(f"The accelerator's DataLoaderConfiguration has {name}={value}. {instead}")


def check_dataset(trainer: TrainerLike, name: str, arguments: DataArguments, other: Source = None) -> None:
    """Check a dataset, or a loader, and the arguments for reading it.

    If an overridden method creates the dataloader, the dataset may be anything.

    Args:
        name: the name of the argument with the dataset
        other: the other dataset of the run, to which ``batch_size`` and ``collate_fn`` also apply
    """
    dataset, batch_size, loader_kwargs, collate_fn, *_ = arguments
    check_positive_int("per_device_batch_size", batch_size)
    name_of_kwargs = name.replace("dataset", "dataloader_kwargs")
    if loader_kwargs is not None and not isinstance(loader_kwargs, dict):
        raise TypeError(f"{name_of_kwargs}={loader_kwargs!r} must be a dict of arguments for torch's DataLoader.")
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn={collate_fn!r} must be a function that makes a batch from a list of samples.")
    is_built = is_overridden(trainer, f"create_{'train' if name == 'train_dataset' else 'eval'}_dataloader")
    parts = _by_name(name, dataset)
    if not parts:
        raise ValueError(f"{name}={{}}: a dict of datasets must not be empty.")
    if not is_built:
        _check_loader_kwargs(name_of_kwargs, loader_kwargs or {})
    for name_of_part, part in parts.items():
        if not is_built:
            _check_readable(name_of_part, part)
        _check_length(name_of_part, dataset_of(part))
    if not is_built and all(map(is_loader, parts.values())):
        options: dict[str, object] = {name_of_kwargs: loader_kwargs or None}
        other_parts = {} if other is None else _by_name("", other)
        if all(map(is_loader, other_parts.values())):
            sizes = [options_of(loader).get("batch_size") for loader in (*parts.values(), *other_parts.values())]
            is_other_size = batch_size not in (DEFAULT_BATCH_SIZE, *sizes)
            options |= {"per_device_batch_size": batch_size if is_other_size else None, "collate_fn": collate_fn}
        _refuse_options(*next(iter(parts.items())), options)


def _check_loader_kwargs(name: str, arguments: LoaderKwargs) -> None:
    """Check that torch's ``DataLoader`` knows all arguments."""
    known = [*inspect.signature(DataLoader).parameters]
    for argument in arguments:
        if argument not in known:
            closest = did_you_mean(str(argument), known)
            raise TypeError(
                f"{name} has the key {argument!r}, which is not an argument of torch's DataLoader.{closest}"
            )


def _check_length(name: str, data: Source) -> None:
    """Check that ``__len__`` of data returns a number of samples. A ``TypeError`` means that there is no length."""
    if not hasattr(type(data), "__len__"):
        return
    try:
        length = type(data).__len__(data)
    except (TypeError, NotImplementedError):
        return
    except Exception as error:
        add_note(error, f"raised by __len__ of {name}, a {type(data).__name__}")
        raise
    if not isinstance(length, numbers.Integral) or not 0 <= int(length) <= sys.maxsize:
        kind = ValueError if isinstance(length, numbers.Integral) else TypeError
        raise kind(
            f"{name}: __len__ of {type(data).__name__} returned {length!r}. It must return the number of samples, an "
            f"int from 0 to {sys.maxsize}."
        )
    if length == 0:
        raise ValueError(f"{name} is empty: {type(data).__name__} has length 0. Check how it was created.")


def _refuse_options(name: str, loader: Source, options: dict[str, object]) -> None:
    for argument, value in options.items():
        if value is not None:
            raise ValueError(
                f"{argument}={short_repr(value)} is for a dataset, but {name} is a loader ({type(loader).__name__}), "
                "which has its own. Set it in the loader instead, or pass the dataset itself."
            )


def _by_name(name: str, data: Source) -> dict[str, Source]:
    """Return the datasets or loaders to be read, by the names that messages use."""
    return {f"{name}[{key!r}]": part for key, part in data.items()} if is_named(data) else {name: data}


def _check_readable(name: str, dataset: Source) -> None:
    refuse_class(name, dataset)
    if dataset is None:
        raise ValueError(f"{name}=None: pass a dataset.")
    if isinstance(dataset, DataLoader) and is_prepared(dataset):
        raise TypeError(
            f"{name} is a {type(dataset).__name__}, which Accelerate has prepared: it gives each process a part "
            "already, and some samples twice. Pass the DataLoader without accelerator.prepare(...)."
        )
    if _are_columns(dataset):
        raise TypeError(
            f"{name} is a {type(dataset).__name__}: its [0] is not the first sample, but a column with a "
            "value for each sample. Pass a dataset of its tensors: TensorDataset(inputs, targets)."
        )
    is_scalar = getattr(dataset, "ndim", 1) == 0  # an array or a tensor with one number
    is_dataset = isinstance(dataset, IterableDataset) or (hasattr(dataset, "__getitem__") and not is_scalar)
    if isinstance(dataset, (str, bytes)) or not (is_dataset or is_loader(dataset)):
        raise TypeError(
            f"{name}={dataset!r} is not a dataset: it needs __getitem__ and __len__, like a list. Data that can "
            "only be iterated over must be a torch.utils.data.IterableDataset, whose __iter__ yields samples. "
            "Pass batches as a DataLoader, or as OwnShard(batches)."
        )


def _are_columns(dataset: Source) -> bool:
    """Whether data are a table by columns: a pandas table, or a pair of inputs and targets."""
    if not isinstance(dataset, tuple) or len(dataset) not in (2, 3):
        return hasattr(dataset, "iloc")
    sizes = {tuple(getattr(column, "shape", ()))[:1] for column in dataset}
    return len(sizes) == 1 and sizes.isdisjoint({(), (1,)})


def check_optimizers(trainer: TrainerLike) -> None:
    """Check that the optimizers have all parameters that are meant to be trained.

    If a factory has not created the optimizer yet, the check is made once it has.
    """
    if not is_created(trainer.optimizer):
        return
    parts, optimized = parts_of_optimizer(trainer.optimizer), set(all_optimized_parameters(trainer))
    missed = not_optimized(trainer.get_model(keep_torch_compile=False), optimized) if parts else {}
    if missed:
        raise ValueError(
            f"None of the optimizers {', '.join(map(repr, parts))} has the model's {listed([*missed], 3)}. Add them to "
            "one of the optimizers, or call requires_grad_(False) on those that should not be trained."
        )
    for check in RUN_CHECKS.of_optimizer:
        check(trainer, optimized)


def not_optimized(module: nn.Module, optimized: Container[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a module that no optimizer has, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and p not in optimized}
