"""The trainer's methods for loading checkpoints, weights and training states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO

from torch import nn

from pytorch_accel_lite.base.paths import PathOrFile, StrPath, check_open_file, name_of, parse_location
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.checkpoint.disk.checkpoint_files import LEFT_OUT, read_checkpoint
from pytorch_accel_lite.checkpoint.disk.checksums import verify
from pytorch_accel_lite.checkpoint.disk.shared_disks import check_on_all_ranks
from pytorch_accel_lite.checkpoint.models.frozen_weights import describe_other_weights
from pytorch_accel_lite.checkpoint.models.optimizer_state_loading import load_optimizer_state
from pytorch_accel_lite.checkpoint.models.states_of_trained_objects import (
    fit_trained_object_states,
    load_loss_state,
    load_state,
    undone_on_error,
)
from pytorch_accel_lite.checkpoint.models.supported_engines import refuse_engines
from pytorch_accel_lite.checkpoint.models.weights import fit_model_state, read_pretrained, verify_weights
from pytorch_accel_lite.checkpoint.states.capture_and_restore import restore_after_start, restore_before_start
from pytorch_accel_lite.checkpoint.states.manifest import MANIFEST
from pytorch_accel_lite.checkpoint.states.settings_in_states_seam import settings_recorder
from pytorch_accel_lite.checkpoint.states.state_files import read_learned
from pytorch_accel_lite.checkpoint.stores_by_url import read_state, store_of
from pytorch_accel_lite.distributed.lost_processes import naming_call
from pytorch_accel_lite.optimizers.optimizer_parts import TrainerOptimizer
from pytorch_accel_lite.run.latest_records import LoadedWeights
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.trained_objects import evaluating_optimizers, set_optimizer_modes


def load_checkpoint(
    trainer: TrainerLike, checkpoint_path: PathOrFile, load_optimizer: bool, load_scheduler: bool, *, strict: bool
) -> StateDict:
    """Load a checkpoint, a saved model or weights, without running code from the file."""
    with naming_call(trainer.ranks, "load_checkpoint()"):
        trainer.ranks.barrier()
    if trainer.prepared_model is not None:
        refuse_engines(trainer.accelerator, "load_checkpoint()", "Call it before the first run of the trainer.")
    model, source = trainer.get_model(keep_torch_compile=False), name_of(checkpoint_path)
    checkpoint = _read_content(trainer, checkpoint_path, model, only_weights=not (load_optimizer or load_scheduler))
    left_out = checkpoint.get(LEFT_OUT, {})
    weights = fit_model_state(model, checkpoint["model_state_dict"], source, strict, left_out)
    if left_out and (others := describe_other_weights(model, left_out, source)):
        warn_outside(f"{others} Create the model from the same pretrained weights.")
    states = checkpoint.get("attribute_state_dicts", {})
    loads_of_attributes = fit_trained_object_states(trainer, states, source, load_optimizer, load_scheduler, strict)
    options = settings_recorder().optimizer_options(trainer)
    with evaluating_optimizers(trainer), undone_on_error(trainer, load_optimizer, load_scheduler):
        if load_optimizer and "optimizer_state_dict" in checkpoint:
            if trainer.optimizer is None:
                raise ValueError(
                    f"The checkpoint {source!r} holds an optimizer's state, but the trainer has "
                    "no optimizer. Pass load_optimizer=False, or give the trainer an optimizer."
                )
            _load_optimizer(trainer.optimizer, checkpoint["optimizer_state_dict"], source)
        if load_scheduler and trainer.scheduler is not None and "scheduler_state_dict" in checkpoint:
            load_state("scheduler", trainer.scheduler, checkpoint["scheduler_state_dict"], source)
        for load in loads_of_attributes:
            load()
        load_loss_state(trainer, checkpoint.get("loss_func_state_dict", {}), source)
        model.load_state_dict(weights, strict=strict and not left_out)
    if not trainer.is_running:
        _say_what_was_loaded(trainer, source, options, load_scheduler and "scheduler_state_dict" in checkpoint)
    numbers = {name: value for name, value in checkpoint.items() if type(value) in (int, float)}
    trainer.current_run.latest.loaded = LoadedWeights(
        os.path.basename(source.rstrip("/")), numbers, trainer.progress.update
    )
    trainer.current_run.latest.evaluation = None
    return checkpoint


def _load_optimizer(optimizer: TrainerOptimizer, state: StateDict, source: str) -> None:
    try:
        load_optimizer_state(optimizer, state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__  # without Accelerate's wrapper
        raise ValueError(
            f"The optimizer in {source!r} does not fit the trainer's {kind}: {error}. Create it as it was when the "
            "checkpoint was saved, or pass load_optimizer=False."
        ) from error


def _say_what_was_loaded(trainer: TrainerLike, source: str, options: Mapping[str, str], wants_scheduler: bool) -> None:
    """Print which options of the optimizer a checkpoint has changed, and whether its schedule was left out.

    Args:
        options: the options before loading
    """
    if changes := settings_recorder().describe_loaded(trainer, options, source):
        trainer.print(f"{changes} To keep this program's options, pass load_optimizer=False, or set them again.")
    if wants_scheduler and trainer.scheduler is None and trainer.optimizer is not None:
        trainer.print(
            f"The schedule in {source!r} was not loaded: train() creates its own, from the start. To "
            "continue a schedule, resume from a training state. load_scheduler=False omits this message."
        )


def _read_content(trainer: TrainerLike, path: PathOrFile, model: nn.Module, only_weights: bool) -> StateDict:
    """Return the content of a checkpoint, of a directory of weights for a model, or of a training state.

    Call it on every process.

    Args:
        only_weights: whether the path may be a training state
    """
    if not isinstance(path, (str, os.PathLike)):
        return _read_open_file(trainer, path)
    location = parse_location(path, "checkpoint_path")
    if isinstance(location, str):
        with store_of(location).fetch_weights(location) as directory:
            for file in directory.glob("*.safetensors"):
                verify(file)
            return read_pretrained(directory, model)
    if (location / MANIFEST).is_file():
        if not only_weights:
            raise ValueError(
                f"{os.fspath(path)!r} is a training state. Load it with trainer.load_training_state(directory), or "
                "resume the run with train(resume_from=directory)."
            )
        return read_learned(location)  # also verifies the whole state
    verify_weights(trainer, location)
    return read_pretrained(location, model) if location.is_dir() else read_checkpoint(location, is_verified=True)


def _read_open_file(trainer: TrainerLike, file: IO[bytes]) -> StateDict:
    """Return the content of this process's open file, if every process can read its file. Call it on every process."""
    checkpoint: StateDict = {}

    def read() -> None:
        check_open_file("checkpoint_path", file, to_write=False)
        checkpoint.update(read_checkpoint(file))

    check_on_all_ranks(trainer.ranks, read)
    return checkpoint


def load_training_state(trainer: TrainerLike, input_dir: StrPath) -> StateDict:
    """Carry out ``Trainer.load_training_state()``.

    A run that resumes calls it only if it is overridden, see ``begin_resuming`` in ``loop/resuming.py``.
    """
    resumed, location = trainer.current_run.resumed, parse_location(input_dir, "input_dir")
    if resumed is not None and os.path.realpath(resumed.directory) == os.path.realpath(location):
        # Called by an override: the run has read this state.
        state = resumed
        restore_before_start(trainer, state, with_scheduler=not trainer.current_run.schedule.is_recreated)
    else:
        training_run = trainer.current_run.training_run
        has_begun = training_run.loop.uses_builtin_loop and training_run.progress.epoch > 0
        if trainer.is_running and has_begun and resumed is None:
            raise RuntimeError(
                f"load_training_state({os.fspath(input_dir)!r}) cannot be called within a run, which would not go back "
                "to it. End the run, and call train(resume_from=directory). For the weights alone, call "
                "load_checkpoint(directory, load_optimizer=False, load_scheduler=False)."
            )
        state = read_state(location, trainer.ranks)
        options = settings_recorder().optimizer_options(trainer)
        restore_before_start(trainer, state)
        restore_after_start(trainer, state)
        if changes := settings_recorder().describe_loaded(trainer, options, os.fspath(input_dir)):
            trainer.print(f"{changes} To train with this program's options, set them again.")
        prepared = trainer.prepared_model
        set_optimizer_modes(trainer, training=prepared is not None and prepared.trains)
    return {"current_epoch": trainer.run_history.current_epoch, **state.metadata, **state.shared["extra"]}
