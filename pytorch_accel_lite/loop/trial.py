"""Trials with a trainer's model, after which everything is restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.modules import preserving_modes
from pytorch_accel_lite.loop.arguments import check_data, check_training
from pytorch_accel_lite.loop.explanations import explaining
from pytorch_accel_lite.loop.lifecycle import begin_training, create_train_loader, entering
from pytorch_accel_lite.loop.preparing import prepare_model, release_model
from pytorch_accel_lite.loop.snapshot import Snapshot, replaced
from pytorch_accel_lite.run import attributes
from pytorch_accel_lite.run.events import CallbackHandler
from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.state import Run, TrainerLike

#: The methods whose updates are those of ``train()``.
_WITH_UPDATES = ("find_lr", "check")


def check_can_try(trainer: TrainerLike, name: str, with_logical_processes: bool = False) -> None:
    """Check that a trainer can make steps outside a run.

    :param name: the calling method, for error messages
    """
    if trainer.is_running:
        raise RuntimeError(f"{name}() cannot be called within a run. Call it before train().")
    if trainer.logical is not None and not with_logical_processes:
        raise ValueError(
            f"{name}() does not work with logical_processes={trainer.logical.count}. Use a trainer without them: the "
            "step of one logical process is that of a trainer on one process."
        )


@contextmanager
def trial(
    trainer: TrainerLike,
    name: str,
    train_dataset: Any,
    batch_size: int,
    request: RunRequest,
    loader_kwargs: Any,
    collate_fn: Any,
) -> Iterator[Run]:
    """Enter a training run that involves no callbacks and leaves no trace.

    :param name: the calling method, for error messages
    """
    check_can_try(trainer, name, with_logical_processes=name == "find_lr")
    if is_overridden(trainer, "train_step") and name not in _WITH_UPDATES:
        raise TypeError(
            f"{name}() makes steps with one loss and one update, unlike {type(trainer).__name__}.train_step. Use a "
            "trainer without that method."
        )
    check_training(trainer.optimizer, trainer.accelerator, request)
    check_data(trainer, "train_dataset", train_dataset, batch_size, loader_kwargs, collate_fn)
    run = Run.create(trainer, request, train_dataset, collate_fn=collate_fn)
    run.data.seed = trainer.seed or 0
    with entering(trainer, run, f"{name}()"):
        create_train_loader(trainer, run, batch_size, loader_kwargs)
        with prepared_for_trial(trainer):
            begin_training(trainer, run, batch_size)
            if run.step.closure and name not in _WITH_UPDATES:
                raise TypeError(
                    f"{name}() makes updates without the closure that the optimizer needs. Try another one."
                )
            attributes.set_optimizer_modes(trainer, training=True)
            run.batch_number = 0
            with explaining(trainer, run, "training"):
                yield run


@contextmanager
def prepared_for_trial(trainer: TrainerLike) -> Iterator[None]:
    """Prepare a trainer for training outside a run, without its callbacks, and restore everything afterwards."""
    prepare_model(trainer, training=True)
    try:
        with Snapshot(on_host=True) as before:  # to leave the memory of the device to the trial
            before.enter_context(replaced(trainer, callback_handler=CallbackHandler(), scheduler=None))
            keep_training(trainer, before)
            yield
    finally:
        if not trainer.is_running:
            release_model(trainer)


def keep_training(trainer: TrainerLike, before: Snapshot) -> None:
    """Keep weights, buffers, gradients, modes, the optimizer, the scaler and the generators.

    This includes those of the loss function, of registered objects, and of other modules of the trainer, such as
    averaged copies, which its steps may change.
    """
    owners = [trainer.get_model(), trainer.loss_func, trainer.optimizer, trainer.accelerator.scaler]
    owners += [*attributes.modules(trainer).values(), *attributes.trained(trainer).values()]
    roots = list(dict.fromkeys(owner for owner in owners if isinstance(owner, nn.Module)))
    stateful = [owner for owner in owners if hasattr(owner, "step") and not isinstance(owner, nn.Module)]
    of_modules = chain.from_iterable(root.parameters() for root in roots)
    parameters = list(dict.fromkeys([*of_modules, *attributes.all_optimized_parameters(trainer)]))
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise ValueError("The model has uninitialised lazy layers. Pass it a batch first: model(inputs).")
    before.enter_context(preserving_modes(chain.from_iterable(root.modules() for root in roots)))
    before.set_gradients_aside(parameters)
    before.keep_states([*stateful, *attributes.registered(trainer).values()])
    before.keep_buffers(roots)
    before.keep_tensors(parameters)
    before.keep_generators()
