"""Checks of the user's arguments before anything else happens.

Each raises a ``TypeError`` or ``ValueError`` for the first invalid argument, with its name and value.
"""

from __future__ import annotations

import inspect
import numbers
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pytorch_accel_lite.base.inspection import accepts, find_length
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.validation import check_choice, check_number, check_positive_int, check_positive_number
from pytorch_accel_lite.engine.history import RunHistory
from pytorch_accel_lite.engine.optimizer_factories import check_factory
from pytorch_accel_lite.optimizers.operations import is_made, parts_of

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest
    from pytorch_accel_lite.distributed import Ranks


# Settings of a run that may differ between ranks.
_OF_ONE_RANK = {"is_local_process_zero", "is_world_process_zero", "train_dl_kwargs", "eval_dl_kwargs"}
_SEEDED = "Leave it out and pass Trainer(seed=...): the order of an epoch then follows from that seed and the epoch."
#: What to do instead of setting an option of the ``DataLoaderConfiguration`` that has no effect here.
_INSTEAD_OF_CONFIGURATION = {
    "use_seedable_sampler": _SEEDED,
    "data_seed": _SEEDED,
    "use_stateful_dataloader": "Leave it out: training states hold the position within an epoch. For a stream that "
    "workers read, return torchdata's StatefulDataLoader from create_train_dataloader.",
}
_SEEDS = 2**32 - 2**20  # leaves a seed for each process of a job of a million


def check_training(optimizer: Any, accelerator: Accelerator, request: RunRequest, create_scheduler_fn: Any) -> None:
    """Check the arguments of a training run."""
    if optimizer is None:
        raise ValueError("optimizer=None: train() needs an optimizer. Pass one to the trainer.")
    if request.num_epochs is None and request.max_num_train_steps is None:
        raise ValueError("num_epochs=None and max_num_train_steps=None: train() needs one of them.")
    check_positive_int("gradient_accumulation_steps", request.gradient_accumulation_steps)
    if request.sanity_eval_batches != 0:
        check_positive_int("sanity_eval_batches", request.sanity_eval_batches)
    for name in ("num_epochs", "max_num_train_steps", "eval_every_n_epochs"):
        if getattr(request, name) is not None:
            _check_length(name, getattr(request, name))
    for name in ("gradient_clip_value", "gradient_clip_norm"):
        if getattr(request, name) is not None:
            check_positive_number(name, getattr(request, name))
    if is_made(optimizer):
        _check_factories(create_scheduler_fn, optimizer)
    _check_stepping(request.scheduler_interval, request.scheduler_metric)
    _check_accelerator(accelerator)


def _check_accelerator(accelerator: Accelerator) -> None:
    """Refuse what an accelerator is set to do and the trainer does otherwise."""
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"The accelerator has gradient_accumulation_steps={accelerator.gradient_accumulation_steps}. "
            "Leave it at 1 there and pass gradient_accumulation_steps to train() instead."
        )
    for name, instead in _INSTEAD_OF_CONFIGURATION.items():
        value = getattr(accelerator.dataloader_config, name)
        if value not in (None, False):
            raise ValueError(f"The accelerator's DataLoaderConfiguration has {name}={value}. {instead}")


def _check_length(name: str, value: Any) -> None:
    if isinstance(value, (Dataset, torch.Tensor)):
        order = "The order of the arguments is train(train_dataset, num_epochs, eval_dataset)."
        raise TypeError(f"{name} is a {type(value).__name__}. {order}")
    check_positive_int(name, value)


def by_name(name: str, given: Any) -> list[tuple[str, Any]]:
    """Return the argument for each optimizer, or for the only one, together with the name the user knows it by."""
    if isinstance(given, Mapping):
        return [(f"{name}[{key!r}]", value) for key, value in given.items()]
    return [(name, given)]


def _check_factories(create_scheduler_fn: Any, optimizer: Any) -> None:
    parts = parts_of(optimizer)
    if isinstance(create_scheduler_fn, Mapping):
        if not parts:
            raise TypeError(
                "create_scheduler_fn is a dict, which is for several optimizers, but the trainer has one. Pass a "
                "single function, or give Trainer a dict of optimizers."
            )
        unknown = [name for name in create_scheduler_fn if name not in parts]
        if unknown:
            known = ", ".join(map(repr, parts))
            raise ValueError(f"create_scheduler_fn[{unknown[0]!r}]: no optimizer has that name, only {known}.")
    for name, create in by_name("create_scheduler_fn", create_scheduler_fn):
        if create is not None and not callable(create):
            raise TypeError(
                f"{name}={create!r} must be a function that creates a scheduler from an optimizer, not a scheduler. "
                "For example: functools.partial(StepLR, step_size=10)."
            )


def check_all_are_optimized(model: nn.Module, optimizer: Any, optimized: Iterable[nn.Parameter]) -> None:
    """Check that several optimizers together have all trainable parameters, as it is easy to forget some.

    :param optimized: the parameters updated by any of the trainer's optimizers
    """
    parts = parts_of(optimizer)
    known = set(optimized) if parts else set()
    missed = [name for name, p in model.named_parameters() if parts and p.requires_grad and p not in known]
    if missed:
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        raise ValueError(
            f"None of the optimizers {', '.join(map(repr, parts))} has the model's {', '.join(missed[:3])}{more}. Add "
            "them to one of the optimizers, or call requires_grad_(False) on those that should not be trained."
        )


def warn_of_what_is_not_trained(
    modules: Iterable[nn.Module],
    loss_func: Any,
    own: Iterable[nn.Parameter],
    optimized: Iterable[nn.Parameter],
    stacklevel: int,
) -> None:
    """Warn if the optimizer has no parameters of the trainer's modules, or no optimizer has those of the loss function.

    :param modules: the model, followed by the trainer's other modules
    :param own: the parameters of the trainer's own optimizer
    :param optimized: the parameters of any of the trainer's optimizers
    :param stacklevel: of the warnings, seen from the caller
    """
    model, *others = modules
    own = list(own)
    if own and {p for module in (model, *others) for p in module.parameters()}.isdisjoint(own):
        warnings.warn(
            f"None of the {len(own)} parameters of the optimizer belongs to the model, so training will not change "
            "the model, unless the optimizer works on copies. Create the optimizer from model.parameters() of the "
            "model passed to the trainer, and recreate it whenever you recreate the model.",
            stacklevel=stacklevel + 1,
        )
    elif own and isinstance(loss_func, nn.Module):
        known = {*model.parameters(), *optimized}
        missed = [name for name, p in loss_func.named_parameters() if p.requires_grad and p not in known]
        if missed:
            more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
            warnings.warn(
                f"{type(loss_func).__name__}, the loss function, has trainable parameters that no optimizer has: "
                f"{', '.join(missed[:3])}{more}. Create the optimizer from [*model.parameters(), "
                "*loss_func.parameters()], or call loss_func.requires_grad_(False) if they should not be trained.",
                stacklevel=stacklevel + 1,
            )


def check_same_call(ranks: Ranks, call: str, datasets: dict[str, Any], callbacks: list[str], seed: int | None) -> None:
    """Check that all ranks begin a run by the same call, with the same datasets, callbacks and seed.

    It comes before any other communication, in which they would wait for each other.

    :param call: the method of the trainer that begins the run
    :param datasets: the datasets by the names of their arguments, of which only is compared which there are
    :param callbacks: the names of their classes, in order
    """
    if ranks.world_size == 1:
        return
    given = {name: _which(dataset) for name, dataset in datasets.items()}
    try:
        check_same_on_all_ranks({"call": call, **given, "callbacks": callbacks, "seed": seed}, ranks)
    except RuntimeError as error:  # the time limit of the process group, or the end of another rank
        raise RuntimeError(
            f"{call} on rank {ranks.rank} waits for the other ranks, but one of them has not called it, or has failed. "
            f"Call it on every process, even if only one uses the results. ({error})"
        ) from error


def _which(dataset: Any) -> Any:
    return [*dataset] if isinstance(dataset, dict) else None if dataset is None else "a dataset"


def check_same_on_all_ranks(given: dict[str, Any], ranks: Ranks) -> None:
    """Check that all ranks have the same settings: otherwise they would deadlock or read each other's samples."""
    of_all = ranks.all_gather_object({name: value for name, value in given.items() if name not in _OF_ONE_RANK})
    own, first = of_all[ranks.rank], of_all[0]
    for rank, other in enumerate(of_all):
        if not isinstance(other, dict) or other.keys() != own.keys():
            raise RuntimeError(f"Rank {rank} communicates about something else.")
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(
                    f"{name}={other[name]!r} on rank {rank}, but {name}={value!r} on rank 0. Make the same calls on "
                    "every process, with the same arguments and callbacks: each derives its share of the run from them."
                )


def check_resume(resume_from: Any) -> None:
    """Check the ``resume_from`` argument.

    :raises TypeError, ValueError: if it is neither ``"latest"`` nor a path
    """
    hint = "Pass 'latest' for the newest state in the save_dir of the SaveTrainingStateCallback, or a state's directory"
    if resume_from is not None and not isinstance(resume_from, (str, os.PathLike)):
        raise TypeError(f"resume_from={resume_from!r} is not a path. {hint}; omit it to start afresh.")
    if resume_from in ("last", "auto", "newest", "best", "") and not os.path.exists(resume_from):
        raise ValueError(f"resume_from={resume_from!r}: there is no such directory. {hint}.")


def _check_stepping(interval: Any, metric: Any) -> None:
    check_choice("scheduler_interval", interval, ("update", "epoch"))
    if metric is not None and not isinstance(metric, str):
        raise TypeError(f"scheduler_metric={metric!r} must be the name of a metric, or None.")
    if metric is not None and interval != "epoch":
        raise ValueError(
            f"scheduler_metric={metric!r}: metrics are recorded once per epoch. Pass scheduler_interval='epoch' too."
        )


def check_data(
    name: str,
    dataset: Any,
    batch_size: int,
    loader_kwargs: Any,
    collate_fn: Any,
    builds_loader: bool,
    needs_targets: bool = False,
) -> None:
    """Check a dataset and the arguments for reading it.

    :param builds_loader: whether an overridden method creates the dataloader, so that the dataset may be anything
    :param needs_targets: whether the dataset must provide targets for the loss function
    """
    if loader_kwargs is not None and not isinstance(loader_kwargs, dict):
        raise TypeError(f"{name.replace('dataset', 'dataloader_kwargs')}={loader_kwargs!r} must be a dict.")
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn={collate_fn!r} must be callable: it makes a batch from a list of samples.")
    check_positive_int("per_device_batch_size", batch_size)
    if collate_fn is not None or "collate_fn" in (loader_kwargs or ()):
        needs_targets = False  # the collate_fn may provide them
    if type(dataset) is not dict:
        _check_dataset(name, dataset, builds_loader, needs_targets)
    elif not dataset:
        raise ValueError(f"{name}={{}}: a dict of datasets must not be empty.")
    else:
        for key, part in dataset.items():
            _check_dataset(f"{name}[{key!r}]", part, builds_loader, needs_targets)


def _check_dataset(name: str, dataset: Any, builds_loader: bool, needs_targets: bool) -> None:
    if not builds_loader:
        _refuse_class(name, dataset, "...")
        if needs_targets and _has_only_inputs(dataset):
            each = " of tensors, each taken for a sample" if isinstance(dataset, (list, tuple)) else ""
            raise TypeError(
                f"{name} is a {type(dataset).__name__}{each} without targets for loss_func. Pass "
                "torch.utils.data.TensorDataset(inputs, targets), or override calculate_train_batch_loss and "
                "calculate_eval_batch_loss for data without targets."
            )
        if dataset is None:
            raise ValueError(f"{name}=None: pass a dataset.")
        if isinstance(dataset, DataLoader):
            raise TypeError(
                f"{name}={dataset!r} is a DataLoader. Pass its dataset, with its arguments as dataloader kwargs, or "
                "return it from create_train_dataloader / create_eval_dataloader."
            )
        if isinstance(dataset, (str, bytes, os.PathLike)):
            raise TypeError(f"{name}={dataset!r} is not a dataset: read its content into one first.")
        if not hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
            raise TypeError(
                f"{name}={dataset!r} is not a dataset: it needs __getitem__ and __len__, like a list. Data that can "
                "only be iterated over must be a torch.utils.data.IterableDataset, whose __iter__ yields samples."
            )
    if find_length(dataset) == 0:
        raise ValueError(f"{name} is empty: {type(dataset).__name__} has length 0. Check how it was created.")


def _has_only_inputs(dataset: Any) -> bool:
    """Whether each sample is a single tensor or array: the data are one tensor, or a list of inputs and targets."""
    samples = dataset[:2] if isinstance(dataset, (list, tuple)) else [dataset]
    return bool(samples) and all(isinstance(sample, (torch.Tensor, np.ndarray)) for sample in samples)


def check_constructor(
    model: Any, loss_func: Any, optimizer: Any, run_history: Any, accelerator: Any, seed: Any
) -> None:
    """Check the arguments of a trainer."""
    _refuse_class("model", model, "...")
    _refuse_class("loss_func", loss_func, "")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} must be a torch.nn.Module.")
    _check_modes(model)
    if hasattr(loss_func, "param_groups"):
        raise TypeError(
            f"loss_func is an optimizer, {type(loss_func).__name__}. The order is Trainer(model, loss_func, optimizer)."
        )
    if loss_func is not None and not callable(loss_func):
        raise TypeError(f"loss_func={loss_func!r} must be callable, or None.")
    several = isinstance(optimizer, (Mapping, list, tuple))  # checked when they are combined
    if optimizer is not None and not several and not hasattr(optimizer, "param_groups"):
        _check_optimizer_factory(optimizer)
    if run_history is not None and not isinstance(run_history, RunHistory):
        raise TypeError(f"run_history={run_history!r} must be an instance of RunHistory, or None.")
    if accelerator is not None and not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator={accelerator!r} must be an accelerate.Accelerator, or None.")
    if seed is not None:
        check_number("seed", seed, numbers.Integral, "a whole number, or None")
        if not 0 <= seed < _SEEDS:
            raise ValueError(f"seed={seed!r} must be at least 0 and less than 2**32, as numpy's generator requires.")


def _check_modes(model: nn.Module) -> None:
    """Check that the parts of a model can be switched between training and evaluation mode."""
    for name, part in model.named_modules():
        if getattr(part.train, "__func__", None) is nn.Module.train:
            continue
        if not (accepts(part.train) and accepts(part.train, False)):
            where = f"model, in its part {name!r}" if name else "model"
            raise TypeError(
                f"{where}: {type(part).__name__}.train{inspect.signature(part.train)} takes the place of the method of "
                "torch.nn.Module that sets training mode and, as train(False), evaluation mode. Rename it, or let it "
                "take mode=True."
            )


def _check_optimizer_factory(factory: Any) -> None:
    """Check that something can make an optimizer from the model's parameters alone."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise TypeError(
            f"optimizer={factory!r} must be an instance of torch.optim.Optimizer, several in a dict or a list, a "
            "function that makes them from the model's parameters, such as functools.partial(AdamW, lr=1e-3), or None."
        )
    check_factory(factory)


def _refuse_class(name: str, value: Any, arguments: str) -> None:
    if isinstance(value, type):
        raise TypeError(f"{name}={value!r} must be an instance, not a class: {value.__name__}({arguments}).")


def check_model_options(compile_model: Any, compile_step: Any, channels_last: Any) -> None:
    """Check the options for preparing the model and the step."""
    for name, given in (("compile_model", compile_model), ("compile_step", compile_step)):
        if not isinstance(given, (bool, dict)):
            raise TypeError(
                f"{name}={given!r} must be True, False, or a dict of arguments for torch.compile, "
                "such as {'mode': 'max-autotune'}."
            )
    if not isinstance(channels_last, bool):
        raise TypeError(f"channels_last={channels_last!r} must be True or False.")


def check_parallelism(accelerator: Accelerator) -> None:
    """Check that the trainer can do what the accelerator's ``parallelism_config`` asks for.

    :raises ValueError: if it cannot
    """
    if getattr(accelerator, "parallelism_config", None) is None:
        return
    sizes = {name: _parallel(accelerator, name) for name in ("cp_size", "sp_size")}
    shared = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if shared:
        raise ValueError(
            f"The accelerator's parallelism_config has {shared}: several processes would share the samples of a "
            "sequence, which the trainer does not do. Context and sequence parallelism are not supported."
        )
    if tensor_parallel_size(accelerator) > 1 and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            f"The accelerator's parallelism_config has tp_size={tensor_parallel_size(accelerator)} beside FSDP, which "
            "Accelerate cannot combine (accelerate issue 3729). Let the model come sharded: load it with transformers' "
            "distributed_config=DistributedConfig(tp_size=..., fsdp_size=...), or call parallelize_module and then "
            "fully_shard in parallelize_model(mesh); pass an Accelerator without an FSDP plugin."
        )


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Return the number of processes that share each batch according to the accelerator's ``parallelism_config``."""
    return _parallel(accelerator, "tp_size")


def _parallel(accelerator: Accelerator, size: str) -> int:
    return getattr(getattr(accelerator, "parallelism_config", None), size, 1) or 1


def check_accelerate_can_shard(trainer: TrainerLike, model: nn.Module) -> None:
    """Check that a model has nothing that Accelerate's FSDP2 is known to shard wrongly.

    :raises ValueError: if it has; says what works instead
    """
    if trainer.prepared_model is not None:
        return
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta and trainer.optimizer is not None and is_made(trainer.optimizer):
        raise ValueError(
            "The model is on the meta device, where Accelerate's FSDP2 cannot tell the parameters of an optimizer "
            "apart (accelerate issue 3930): it would train the wrong ones without an error. Pass a function that "
            "creates the optimizer after sharding: TrainerLike(model, loss_func, functools.partial(AdamW, lr=1e-3))."
        )
    plugin = trainer.accelerator.state.fsdp_plugin
    persistent = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if persistent and getattr(plugin, "cpu_ram_efficient_loading", False):
        raise ValueError(
            "The FSDP plugin has cpu_ram_efficient_loading=True, with which Accelerate fails for buffers that are part "
            f"of the model's state (accelerate issue 3898), as {persistent[0]!r} is. Pass "
            "FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)."
        )
