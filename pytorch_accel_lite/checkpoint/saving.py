"""What a trainer saves and loads: portable checkpoints, weights for others, training states."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accel_lite import attributes
from pytorch_accel_lite.checkpoint.background import BackgroundWriter
from pytorch_accel_lite.checkpoint.beside_model import (
    attribute_states,
    load_attribute_state,
    load_loss_state,
    loss_state,
)
from pytorch_accel_lite.checkpoint.files import StrPath, read_checkpoint, replacing, write_checkpoint, write_tensors
from pytorch_accel_lite.checkpoint.snapshot import capture, check_states_are_possible, finish_restoring, restore
from pytorch_accel_lite.checkpoint.training_state import read_state, write_state
from pytorch_accel_lite.checkpoint.weights import fit_model_state, full_state_dict, model_state
from pytorch_accel_lite.events import NonFiniteLossError, timed_as_saving
from pytorch_accel_lite.optimizers import load_optimizer_state

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


@timed_as_saving
def save_checkpoint(
    self: Trainer,
    save_path: StrPath,
    checkpoint_kwargs: dict[str, Any] | None = None,
    save_optimizer: bool = True,
    save_scheduler: bool = True,
    save_per_node: bool = True,
) -> None:
    """Save the weights as one portable file, written whole or not at all. To be called on every process.

    With them what the loss function has learned, and the trainer's attributes that are trained, heads and critics say
    (not with ``saves_attributes = False`` in the trainer's class).

    :param save_path: usually ends in ``.pt``; missing folders are made
    :param checkpoint_kwargs: further entries of the file
    :param save_optimizer: include the optimizer's state, and those of optimizers that are attributes
    :param save_scheduler: include the scheduler's state, if there is a scheduler; so those that are attributes
    :param save_per_node: save once on every machine; ``False``: once in the whole job
    """
    with attributes.evaluating_optimizers(self):
        here = self.accelerator.is_local_main_process if save_per_node else self.accelerator.is_main_process
        checkpoint = {"model_state_dict": model_state(self.get_model(keep_torch_compile=False), here)}
        state = None if self.optimizer is None or not save_optimizer else self.optimizer.state_dict()
        if state is not None:  # as it is of an optimizer that is yet to be made
            checkpoint["optimizer_state_dict"] = full_state_dict(state, here)
        if save_scheduler and self.scheduler is not None:
            checkpoint["scheduler_state_dict"] = self.scheduler.state_dict()
        if learned := loss_state(self):
            checkpoint["loss_func_state_dict"] = learned
        if held := attribute_states(self, here, save_optimizer, save_scheduler):
            checkpoint["attribute_state_dicts"] = held
        checkpoint.update(checkpoint_kwargs or {})
        self.ranks.barrier()  # where others may still read the file that is replaced
        self.ranks.run_together(lambda: write_checkpoint(checkpoint, save_path) if here else None)


def load_checkpoint(
    self: Trainer,
    checkpoint_path: StrPath,
    load_optimizer: bool = True,
    load_scheduler: bool = True,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Load weights saved by :meth:`save_checkpoint`, without running code from the file.

    Those of the loss function and of the trainer's attributes too, where the file holds them and the trainer has them.

    :param load_optimizer: load the optimizer's state too, if it was saved
    :param load_scheduler: load the scheduler's state too, if it was saved and there is a scheduler
    :param strict: ``False`` to load the weights that fit, and to warn of the others
    :return: the whole content of the file
    :raises ValueError: when it does not fit the model; lists missing and unexpected keys
    """
    self.ranks.barrier()
    checkpoint = read_checkpoint(checkpoint_path)
    model = self.get_model(keep_torch_compile=False)
    weights = fit_model_state(model, checkpoint["model_state_dict"], checkpoint_path, strict)
    with attributes.evaluating_optimizers(self):
        if load_optimizer and "optimizer_state_dict" in checkpoint:
            if self.optimizer is None:
                raise ValueError(
                    f"The checkpoint {os.fspath(checkpoint_path)!r} holds an optimizer's state, but the trainer has "
                    "no optimizer. Pass load_optimizer=False, or give the trainer an optimizer."
                )
            load_optimizer_state(self.optimizer, checkpoint["optimizer_state_dict"])
            self.current_run.rates_left = []  # rates that differ from those were loaded, not set by hand
        if load_scheduler and self.scheduler is not None and "scheduler_state_dict" in checkpoint:
            self.scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
        load_loss_state(self, checkpoint.get("loss_func_state_dict", {}), checkpoint_path)
        held = checkpoint.get("attribute_state_dicts", {})
        for name, owner in attributes.trained(self).items():
            is_asked_for = load_optimizer if isinstance(owner, torch.optim.Optimizer) else load_scheduler
            if name in held and (isinstance(owner, nn.Module) or is_asked_for):
                load_attribute_state(owner, name, held[name], checkpoint_path, strict)
        model.load_state_dict(weights, strict=strict)
    return checkpoint


@timed_as_saving
def save_model(self: Trainer, path: StrPath) -> None:
    """Save the weights only, as safetensors, whole or not at all, once in the job. For use by others.

    To be called on every process.

    :param path: usually ends in ``.safetensors``; missing folders are made
    """
    with attributes.evaluating_optimizers(self):
        weights = model_state(self.get_model(keep_torch_compile=False), keep=self.accelerator.is_main_process)

        def write() -> None:
            with replacing(Path(path)) as temporary:
                write_tensors(weights, temporary)

        self.ranks.run_together(write, only_first=True)


def check_weights(self: Trainer) -> None:
    """Check that what is trained is finite, and no buffer NaN, before it replaces what was saved. Reads the device.

    To be called on every process.

    :raises NonFiniteLossError: on all processes, when a weight is infinite or NaN on one
    """

    def floating(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [getattr(t, "_local_tensor", t) for t in tensors if t.is_floating_point() and t.itemsize > 1]

    of_model = self.model.parameters() if self.is_sharded else ()
    trained = floating([*of_model, *attributes.all_optimized_parameters(self)])
    buffers = floating(self.model.buffers())  # they may be infinite, as masks are
    finite = all(bool(w.isfinite().all()) for w in trained) and not any(bool(b.isnan().any()) for b in buffers)
    if self.ranks.max([float(not finite)])[0]:
        raise NonFiniteLossError(
            f"Weights are infinite or NaN after update {self.progress.update}, and were not saved. Lower the "
            "learning rate, clip the gradients, or go on from an earlier state with SkipFailedBatchesCallback or "
            "GradientSpikeCallback."
        )


def register_for_checkpointing(self: Trainer, name: str, obj: Any) -> None:
    """Include one of your own objects in every training state.

    :param name: what it is called there; the same in the run that resumes
    :param obj: has ``state_dict()``, the same on every process, and ``load_state_dict(state)``
    """
    if not hasattr(obj, "state_dict") or not hasattr(obj, "load_state_dict"):
        raise TypeError(f"{name}={obj!r} must have state_dict() and load_state_dict(state).")
    if name in self.registered_objects:
        raise ValueError(f"An object is already registered as {name!r}. Choose another name.")
    self.registered_objects[name] = obj


@timed_as_saving
def save_training_state(
    self: Trainer,
    output_dir: StrPath,
    checkpoint_kwargs: dict[str, Any] | None = None,
    *,
    writer: BackgroundWriter | None = None,
    then: Callable[[], None] | None = None,
) -> None:
    """Save all that the run needs to go on, as a directory that is whole or does not exist.

    To be called on every process, between updates: in ``on_train_step_checkpoint`` or ``on_epoch_checkpoint``,
    or after a run.

    :param output_dir: the state's name; a state of this name is replaced when the new one is whole
    :param checkpoint_kwargs: further entries, returned by :meth:`load_training_state`
    :param writer: copy the state to host memory and let this write it while training goes on
    :param then: called on every process when the state is whole
    :raises TypeError: when a value cannot be stored without pickle; names the path to it
    :raises OSError: when it cannot be written
    :raises RuntimeError: within an accumulation window, or in an epoch whose order does not follow from a seed
    """
    if self.current_run.window.sizes is not None:
        raise RuntimeError(
            "A training state can only be saved between updates. Save it in on_train_step_checkpoint or "
            "on_epoch_checkpoint."
        )
    if self.progress.is_mid_epoch and self.current_run.data_seed is None:
        raise RuntimeError(
            "The order of this epoch does not follow from a seed, so a run could not go on in its middle. Give the "
            "trainer a seed or a SaveTrainingStateCallback, or save in on_epoch_checkpoint."
        )
    check_states_are_possible(self.accelerator)
    if writer is not None:
        writer.wait()  # before what it holds in memory is held twice
    snapshot = capture(self, dict(checkpoint_kwargs or {}))
    ranks = self.ranks if writer is None else writer.ranks

    def write() -> None:
        write_state(Path(output_dir), ranks, snapshot)
        if then is not None:
            then()

    if writer is None:
        write()
    else:
        snapshot = snapshot.to_host()
        writer.start(write)


def load_training_state(self: Trainer, input_dir: StrPath) -> dict[str, Any]:
    """Load a training state into the trainer; to resume a run, which calls this too, see ``train(resume_from=)``.

    :return: the state's metadata, ``current_epoch``, and what was given as ``checkpoint_kwargs``
    :raises DamagedStateError: when the state is not whole; names the file
    :raises ValueError: when it does not fit the model or the optimizer
    """
    resumed = self.current_run.resumed
    if resumed is not None and resumed.directory == Path(input_dir):  # the run has read it, and finishes it later
        state = resumed
        restore(self, state, with_scheduler=not self.current_run.recreates_schedule)
    else:
        state = read_state(Path(input_dir), self.ranks)
        restore(self, state)
        finish_restoring(self, state)
        prepared = self.prepared_model
        attributes.set_optimizer_modes(self, training=prepared is not None and prepared.trains)
    return {"current_epoch": self.run_history.current_epoch, **state.metadata, **state.shared["extra"]}
