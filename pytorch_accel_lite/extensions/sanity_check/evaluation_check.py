"""Trying the evaluation on one batch of each dataset before training, and restoring everything afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isroutine
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from pytorch_accel_lite.data import BatchData, FailedRead, ShardedLoader
from pytorch_accel_lite.extending import BatchAdapter, BatchOutput, Run, Snapshot, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import add_note, is_from_this_package
from pytorch_accel_lite.extension_tools.data_and_batches import complete_output
from pytorch_accel_lite.extension_tools.modules_and_devices import mixed_precision, preserving_modes
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import other_modules
from pytorch_accel_lite.extension_tools.random_numbers import find_held_generators, preserving_held_generators
from pytorch_accel_lite.extension_tools.runs_and_steps import (
    adding_error_notes,
    preserving_attributes,
    replaced,
    unwrapped_model,
)
from pytorch_accel_lite.extensions.sanity_check.single_batches import (
    can_read_single_batch,
    datasets_in,
    read_single_batch,
)

#: Methods that may leave traces if users override them, so that an evaluation with them is not tried.
_METHODS = {"calculate_eval_batch_loss", "eval_epoch_start", "_run_eval_epoch", "_run_train_epoch"}
_EVENTS = ("on_eval_epoch_start", "on_eval_step_start")


@runtime_checkable
class TriesEvaluation(Protocol):
    """A callback that takes part in the trial."""

    def try_on(self, trainer: TrainerLike, batch: BatchData, batch_output: BatchOutput) -> None:
        """Try what the callback does with an evaluation batch, without keeping anything."""


def check_evaluation(trainer: TrainerLike, run: Run) -> None:
    """Try the evaluation on one batch of each dataset, unless that may leave traces or depends on earlier training.

    An error says that it was raised before training, and how to omit the trial.
    """
    data = run.data
    if not run.request.sanity_check or data.eval_loader is None or not _leaves_no_trace(trainer, run):
        return
    try:
        for name, loader in (data.eval_loaders or {"": data.required_eval_loader}).items():
            if can_read_single_batch(loader):
                with replaced(data, eval_loader=loader, eval_dataset_name=name or None):
                    _try_batch(trainer, run, loader)
    except Exception as error:
        add_note(
            error,
            "The evaluation was tried on one batch before the first update, so nothing has been trained yet. "
            "train(sanity_check=False) omits this.",
        )
        raise


def _leaves_no_trace(trainer: TrainerLike, run: Run) -> bool:
    """Whether the evaluation can be tried without side effects, and in the way in which it will be made later."""
    request = run.request
    is_plain = run.resumed is None and not (request.auto_microbatch or request.skips_in_evaluation)
    if not is_plain or trainer.is_sharded or trainer.division.has_fixed_shares or run.overridden & _METHODS:
        return False
    listeners = chain.from_iterable(trainer.callback_handler.listeners[event] for event in _EVENTS)
    if not all(is_from_this_package(type(getattr(listener, "__self__", listener))) for listener in listeners):
        return False
    return all(map(_has_no_hooks, _modules(trainer))) and trainer.compiled_forward is None


def _has_no_hooks(module: nn.Module) -> bool:
    """Whether a module is initialised, has no hooks, and is not compiled, so that a first call has no effect."""
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        return False
    if any(vars(module).get(name) for name in ("_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks")):
        return False
    return not any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters(recurse=False))


def _modules(trainer: TrainerLike) -> list[nn.Module]:
    """Return the model, the loss function and other modules of a trainer, with all their parts."""
    roots = [trainer.get_model(keep_torch_compile=True), trainer.loss_func, *other_modules(trainer).values()]
    return list(dict.fromkeys(part for root in roots if isinstance(root, nn.Module) for part in root.modules()))


def _try_batch(trainer: TrainerLike, run: Run, loader: ShardedLoader) -> None:
    owners = [*_modules(trainer), trainer.loss_func, *datasets_in(loader), loader.source.collate_fn]
    with (
        _leaving_no_trace(owners),
        replaced(run, batch=None, batch_number=0, loss_trackers=trainer.division.create_trackers()),
        adding_error_notes(trainer, run, "evaluation"),
    ):
        run.batch = batch = read_single_batch(loader)
        if isinstance(batch.data, FailedRead):
            raise batch.data.error
        with unwrapped_model(trainer), torch.no_grad(), mixed_precision(trainer.accelerator):
            adapter = BatchAdapter(trainer.model)  # the trainer's adapter has not seen the first batch yet
            output = adapter.outputs_and_loss(trainer.model, trainer.loss_func, batch.data, batch)
        output = complete_output(output, batch.data, batch.num_samples, "calculate_eval_batch_loss", training=False)
        for callback in trainer.callback_handler:
            if isinstance(callback, TriesEvaluation):
                callback.try_on(trainer, batch.data, output)


@contextmanager
def _leaving_no_trace(owners: list[object]) -> Iterator[None]:
    """Restore modules, datasets and generators after a block that evaluates."""
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    objects = [it for it in {id(it): it for it in owners}.values() if hasattr(it, "__dict__") and not isroutine(it)]
    with (
        Snapshot() as before,
        preserving_attributes(*objects),
        preserving_held_generators(find_held_generators(owners)),
        preserving_modes(modules),
        warnings.catch_warnings(),
    ):
        before.keep_generators()
        before.keep_buffers(modules)
        warnings.simplefilter("ignore")  # the real evaluation repeats the warnings
        for module in modules:
            module.training = False
        yield
