"""Checks of datasets and loaders, and of the arguments for reading them, before anything else happens."""

from __future__ import annotations

import inspect
import numbers
import sys

from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite.base.arguments.argument_checks import check_positive_int, refuse_class
from pytorch_accel_lite.base.display.reprs import short_repr
from pytorch_accel_lite.base.display.shown_errors import add_note
from pytorch_accel_lite.base.names.unknown_names import did_you_mean
from pytorch_accel_lite.base.user_code import is_overridden
from pytorch_accel_lite.data.dataloader_creation import DEFAULT_BATCH_SIZE, LoaderKwargs, options_of
from pytorch_accel_lite.data.sampler_order_checks import is_prepared
from pytorch_accel_lite.data.sources import Source, dataset_of, is_loader
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.run_parts.run_data import DataArguments


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
    return {f"{name}[{key!r}]": part for key, part in data.items()} if isinstance(data, dict) else {name: data}


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
