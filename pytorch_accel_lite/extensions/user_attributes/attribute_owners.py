"""Which attributes are the users', of the trainer and of callbacks, and which of them are saved elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from torch import nn

from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import is_from_this_package, library_attributes
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import named_callbacks
from pytorch_accel_lite.extension_tools.states_and_files import SavedBeside, unsaved_attribute_names

#: The names of an owner and of one of its attributes.
Key = tuple[str, str]

_RECENT = 30 * 24 * 3600  # seconds


def attributes_of_users(trainer: TrainerLike, trained: Collection[str]) -> Iterator[tuple[Key, object]]:
    """Yield the users' attributes, except points in time and attributes that are saved with the trainer.

    Args:
        trained: the names of trained objects
    """
    now = time.time()
    for owner_name, owner in owners_of_attributes(trainer).items():
        library = _library_names(owner) | unsaved_attribute_names(owner)
        for name, value in [*vars(owner).items()]:
            is_instant = type(value) is float and now - _RECENT < value <= now
            if name not in library and not is_instant and (owner_name or name not in trained):
                yield (owner_name, name), value


def owners_of_attributes(trainer: TrainerLike) -> dict[str, TrainerLike | TrainerCallback]:
    """Return the owners of kept attributes, by name: the trainer, and callbacks without a state of their own."""
    if not trainer.saves_attributes:
        return {}
    callbacks = {
        name: callback
        for name, callback in named_callbacks(trainer.callback_handler).items()
        if not is_from_this_package(type(callback)) and callback.saves_attributes and not _has_own_state(callback)
    }
    return {"": trainer, **callbacks}


def _has_own_state(callback: TrainerCallback) -> bool:
    method = getattr(type(callback), "state_dict", None) or getattr(callback, "state_dict", None)
    return method is not None and not is_from_this_package(method)


def _library_names(owner: TrainerLike | TrainerCallback) -> set[str]:
    """Return the names of the package's own attributes, which its classes have or its constructors set."""
    ours = [kind for kind in type(owner).__mro__ if is_from_this_package(kind)]
    if isinstance(owner, TrainerCallback):
        ours_has = set(chain.from_iterable(map(vars, ours)))
        if ours != [TrainerCallback]:  # a built-in base class may create private attributes later
            ours_has |= {name for name in vars(owner) if name.startswith("_")}
        return ours_has | library_attributes(owner)
    return library_attributes(owner)


def saved_elsewhere(trainer: TrainerLike, beside: SavedBeside) -> Callable[[object], bool]:
    """Return whether an object is saved elsewhere in a training state, or is a part of the run."""
    optimizer = trainer.optimizer
    roots: list[object] = [trainer.model, trainer.get_model(), trainer.loss_func]
    roots += [*beside.trained.values(), *beside.loose.values(), *beside.registered.values()]
    modules = [root for root in roots if isinstance(root, nn.Module)]
    objects = [
        trainer, trainer.accelerator, trainer.callback_handler, trainer.run_history, trainer.current_run, optimizer,
        getattr(optimizer, "optimizer", None), trainer.scheduler, trainer.train_dataset, trainer.eval_dataset,
        *trainer.callback_handler, *roots,
    ]  # fmt: skip
    for module in modules:
        objects += [*module.modules(), *module.parameters(), *module.buffers()]
    ids = {id(thing): thing for thing in objects if thing is not None}
    return lambda value: id(value) in ids


def path_of(key: Key) -> str:
    """Return the name of an attribute in messages."""
    owner, name = key
    return f"{owner}.{name}" if owner else name
