"""The trainer's methods for saving and loading checkpoints, weights and training states."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch import nn

from pytorch_accel_lite.base.origins import warn_outside
from pytorch_accel_lite.base.paths import PathOrFile, StrPath, check_open_file, file_path, name_of, parse_location
from pytorch_accel_lite.base.text import listed
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.checkpoint.attribute_states import (
    attribute_states,
    load_attribute_states,
    load_loss_state,
    loss_state,
    names_beside_model,
)
from pytorch_accel_lite.checkpoint.background_writer import BackgroundWriter
from pytorch_accel_lite.checkpoint.capture_and_restore import (
    capture,
    check_states_are_possible,
    finish_restoring,
    refuse_engines,
    refuse_fsdp1,
    restore,
)
from pytorch_accel_lite.checkpoint.checksums import UNSEALED, seal, verify
from pytorch_accel_lite.checkpoint.files import (
    FROZEN,
    read_checkpoint,
    replacing,
    write_checkpoint,
    write_sealed,
    write_tensors,
)
from pytorch_accel_lite.checkpoint.locations import open_folder, read_state, store_of, write_state
from pytorch_accel_lite.checkpoint.manifest import MANIFEST
from pytorch_accel_lite.checkpoint.model_forms import MODEL_FORMS, WriteModel, find_writer, write_in_form
from pytorch_accel_lite.checkpoint.model_writers import MODEL_WRITERS, SavedModel
from pytorch_accel_lite.checkpoint.recorded_settings import describe_optimizers
from pytorch_accel_lite.checkpoint.settings_comparison import describe_loaded
from pytorch_accel_lite.checkpoint.state_directory import CapturedState, read_learned
from pytorch_accel_lite.checkpoint.user_attributes import changed_modules
from pytorch_accel_lite.checkpoint.weights import (
    WEIGHTS,
    check_has_trainable,
    describe_other_weights,
    fit_model_state,
    full_state_dict,
    leave_out_frozen,
    load_optimizer_state,
    model_state,
    read_pretrained,
    verify_weights,
)
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.lost_processes import naming_call
from pytorch_accel_lite.extension_names import missing_extension_text
from pytorch_accel_lite.run import attributes
from pytorch_accel_lite.run.events import NonFiniteLossError
from pytorch_accel_lite.run.parts import LoadedWeights
from pytorch_accel_lite.run.run_and_interfaces import TrainerLike


def _warn_of_weights(trainer: TrainerLike, method: str) -> None:
    """Warn on the first process if the weights to save are not finite. Call it on every process."""
    with naming_call(trainer.ranks, f"{method}()"):
        are_finite = attributes.weights_are_finite(trainer)
    if not are_finite and trainer.accelerator.is_main_process:
        warn_outside(
            f"{method}() saves weights that are infinite or NaN, as they are after update {trainer.progress.update}. "
            "check_weights() raises an error instead."
        )


@contextmanager
def _timed(trainer: TrainerLike) -> Iterator[None]:
    """Count the time of a block as saving."""
    timer = trainer.callback_handler.timer
    with nullcontext() if timer is None else timer("saving"), trainer.current_run.goodput.counting("saving"):
        yield


def _check_on_all_ranks(trainer: TrainerLike, look_at: Callable[[], object]) -> None:
    """Check a file that a user has opened. Call it on every process.

    Raises:
        TypeError: on all processes, if any raises it; likewise ``ValueError``
    """

    def find_problem() -> TypeError | ValueError | None:
        try:
            look_at()
        except (TypeError, ValueError) as error:
            return error.with_traceback(None)
        return None

    for problem in trainer.ranks.run_together(find_problem):
        if problem is not None:
            raise problem


def save_checkpoint(
    trainer: TrainerLike,
    save_path: PathOrFile,
    checkpoint_kwargs: StateDict | None,
    save_optimizer: bool,
    save_scheduler: bool,
    save_per_node: bool,
    *,
    trainable_only: bool,
) -> None:
    """Carry out ``Trainer.save_checkpoint()``."""
    target: PathOrFile = save_path
    if isinstance(save_path, (str, os.PathLike)):
        target = file_path("save_path", save_path, "a checkpoint")
    else:
        save_per_node = False
    kwargs = dict(checkpoint_kwargs or {})
    trainer.ranks.repeatable(
        lambda: _attempt_to_save_checkpoint(
            trainer, target, kwargs, save_optimizer, save_scheduler, save_per_node, trainable_only
        )
    )


def _attempt_to_save_checkpoint(
    trainer: TrainerLike,
    target: PathOrFile,
    checkpoint_kwargs: dict[str, object],
    save_optimizer: bool,
    save_scheduler: bool,
    save_per_node: bool,
    trainable_only: bool,
) -> None:
    writes = trainer.accelerator.is_local_main_process if save_per_node else trainer.accelerator.is_main_process
    with naming_call(trainer.ranks, "save_checkpoint()"):
        _check_on_all_ranks(trainer, lambda: check_open_file("save_path", target, to_write=True) if writes else None)
    if save_optimizer:
        refuse_engines(trainer.accelerator, "save_checkpoint(save_optimizer=True)", "Pass save_optimizer=False.")
    refuse_fsdp1(trainer.accelerator, "save_checkpoint()")
    model = trainer.get_model(keep_torch_compile=False)
    if trainable_only:
        check_has_trainable(model)
    with _timed(trainer), attributes.evaluating_optimizers(trainer):
        _warn_of_weights(trainer, "save_checkpoint")
        weights = model_state(model, writes)
        checkpoint: StateDict = {"model_state_dict": weights}
        frozen_left_out = leave_out_frozen(model, weights, only_quantised=not trainable_only) if writes else {}
        if frozen_left_out:
            checkpoint[FROZEN] = frozen_left_out
        state = None if trainer.optimizer is None or not save_optimizer else trainer.optimizer.state_dict()
        if state is not None:  # an optimizer that is not created yet has no state
            checkpoint["optimizer_state_dict"] = full_state_dict(state, writes)
        if save_scheduler and trainer.scheduler is not None:
            checkpoint["scheduler_state_dict"] = trainer.scheduler.state_dict()
        if learned := loss_state(trainer):
            checkpoint["loss_func_state_dict"] = learned
        if states := attribute_states(trainer, writes, save_optimizer, save_scheduler, changed_modules(trainer)):
            checkpoint["attribute_state_dicts"] = states
        checkpoint.update(checkpoint_kwargs)
        trainer.ranks.barrier()  # other processes may still be reading the old file
        trainer.ranks.run_together(lambda: write_checkpoint(checkpoint, target) if writes else None)


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
    frozen_left_out = checkpoint.get(FROZEN, {})
    weights = fit_model_state(model, checkpoint["model_state_dict"], source, strict, frozen_left_out)
    if frozen_left_out and (others := describe_other_weights(model, frozen_left_out, source)):
        warn_outside(f"{others} Create the model from the same pretrained weights.")
    options = describe_optimizers(trainer)
    with attributes.evaluating_optimizers(trainer):
        if load_optimizer and "optimizer_state_dict" in checkpoint:
            if trainer.optimizer is None:
                raise ValueError(
                    f"The checkpoint {source!r} holds an optimizer's state, but the trainer has "
                    "no optimizer. Pass load_optimizer=False, or give the trainer an optimizer."
                )
            load_optimizer_state(trainer.optimizer, checkpoint["optimizer_state_dict"])
            trainer.current_run.schedule.final_rates = []  # the rates were loaded, not set by the user
        if load_scheduler and trainer.scheduler is not None and "scheduler_state_dict" in checkpoint:
            trainer.scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
        load_loss_state(trainer, checkpoint.get("loss_func_state_dict", {}), source)
        states = checkpoint.get("attribute_state_dicts", {})
        load_attribute_states(trainer, states, source, load_optimizer, load_scheduler, strict)
        model.load_state_dict(weights, strict=strict and not frozen_left_out)
    if not trainer.is_running:
        _say_what_was_loaded(trainer, source, options, load_scheduler and "scheduler_state_dict" in checkpoint)
    numbers = {name: value for name, value in checkpoint.items() if type(value) in (int, float)}
    trainer.current_run.latest.loaded = LoadedWeights(
        os.path.basename(source.rstrip("/")), numbers, trainer.progress.update
    )
    trainer.current_run.latest.evaluation = None
    return checkpoint


def _say_what_was_loaded(trainer: TrainerLike, source: str, options: Mapping[str, str], wants_scheduler: bool) -> None:
    """Print which options of the optimizer a checkpoint has changed, and whether its schedule was left out.

    Args:
        options: the options before loading
    """
    if changes := describe_loaded(trainer, options, source):
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

    _check_on_all_ranks(trainer, read)
    return checkpoint


def _split(location: Path | str) -> tuple[Path | str, str]:
    """Return the folder and the name of a file on a disk or in a remote store."""
    if isinstance(location, Path):
        return location.parent, location.name
    folder, _, name = location.rpartition("/")
    return folder, name


def save_model(
    trainer: TrainerLike, path: PathOrFile, *, trainable_only: bool, card_data: Mapping[str, object] | None
) -> None:
    """Carry out ``Trainer.save_model()``."""
    is_directory = isinstance(path, (str, os.PathLike)) and not os.fspath(path).endswith(".safetensors")
    if card_data is not None:
        _check_card_data(card_data, None if is_directory else name_of(path))

    def write_beside(folder: Path) -> None:
        saved = SavedModel(folder, parse_location(name_of(path)), trainable_only, card_data or {})
        for writer in MODEL_WRITERS.values():
            writer.write(trainer, saved)

    trainer.ranks.repeatable(
        lambda: _attempt_to_save_model(trainer, path, trainable_only, write_beside if is_directory else None)
    )


def _check_card_data(card_data: Mapping[str, object], file: str | None) -> None:
    if file is not None:
        raise ValueError(
            f"card_data={card_data!r} is for a model card, but path={file!r} is one file, without a card. "
            "Pass the path of a directory, or omit card_data."
        )
    if not MODEL_WRITERS:
        raise ValueError(f"card_data={card_data!r} {missing_extension_text('reports')}")
    for writer in MODEL_WRITERS.values():
        writer.check(card_data)


def _attempt_to_save_model(
    trainer: TrainerLike, path: PathOrFile, trainable_only: bool, write_beside: Callable[[Path], None] | None
) -> None:
    """Save the weights in a directory with further files, or as one file. Call it on every process.

    Args:
        write_beside: called on the first process with the directory, once the weights are in it; ``None`` for a file
    """
    location = parse_location(path) if isinstance(path, (str, os.PathLike)) else path
    writes = trainer.accelerator.is_main_process
    with naming_call(trainer.ranks, "save_model()"):
        _check_on_all_ranks(trainer, lambda: check_open_file("path", path, to_write=True) if writes else None)
    refuse_fsdp1(trainer.accelerator, "save_model()")
    model = trainer.get_model(keep_torch_compile=False)
    if trainable_only:
        check_has_trainable(model)
    with _timed(trainer), attributes.evaluating_optimizers(trainer):
        _warn_of_weights(trainer, "save_model")
        weights = model_state(model, keep=writes)
        _say_what_is_unsaved(trainer, name_of(path))

        def write() -> None:
            has_form = write_beside is not None and not trainable_only
            writer = find_writer(trainer, model) if has_form else None
            frozen_left_out = (
                {} if writer is not None else leave_out_frozen(model, weights, only_quantised=not trainable_only)
            )
            metadata = {FROZEN: json.dumps(frozen_left_out)} if frozen_left_out else {}
            if isinstance(location, (Path, str)):
                _write_weights(weights, location, metadata, write_beside, writer)
                if write_beside is not None and writer is None and isinstance(location, Path):
                    for form in MODEL_FORMS.values():
                        form.clear(location, model)
            else:
                write_sealed(weights, location, metadata)

        trainer.ranks.run_together(write, only_first=True)


def _write_weights(
    weights: Mapping[str, torch.Tensor],
    location: Path | str,
    metadata: Mapping[str, str],
    write_beside: Callable[[Path], None] | None,
    writer: WriteModel | None,
) -> None:
    """Write weights as a safetensors file, or into a directory with further files.

    Args:
        writer: writes the model in the form of its library; ``None`` for the weights alone
    """
    if write_beside is not None and isinstance(location, Path) and location.is_file():
        raise ValueError(
            f"path={os.fspath(location)!r} is a file, but should be a directory for a model and its card. Pass another "
            "path, or move the file."
        )
    folder, name = (location, WEIGHTS) if write_beside is not None else _split(location)
    with open_folder(folder) as directory:
        if writer is not None:
            write_in_form(writer, weights, directory)
        else:
            with replacing(directory / name) as temporary:
                write_tensors(weights, temporary, {**UNSEALED, **metadata})
                seal(temporary)
        if write_beside is not None:
            write_beside(directory)


def _say_what_is_unsaved(trainer: TrainerLike, name: str) -> None:
    if unsaved := [*names_beside_model(trainer), *changed_modules(trainer)]:
        trainer.print(
            f"{name!r} holds the model alone, without what was trained besides it: "
            f"{listed(unsaved, 10)}. save_checkpoint() includes that."
        )


def check_weights(trainer: TrainerLike) -> None:
    """Check that the weights are finite, as ``Trainer.check_weights()`` describes."""
    if not attributes.weights_are_finite(trainer):
        raise NonFiniteLossError(
            f"Weights are infinite or NaN after update {trainer.progress.update}, and were not saved. Lower the "
            "learning rate, clip the gradients, or resume from an earlier state with SkipFailedBatchesCallback or "
            "GradientSpikeCallback."
        )


def save_training_state(
    trainer: TrainerLike,
    output_dir: StrPath,
    checkpoint_kwargs: StateDict | None,
    *,
    writer: BackgroundWriter | None,
    then: Callable[[], None] | None,
    created_weights: Mapping[str, int] | None,
    sharded: bool,
) -> None:
    """Carry out ``Trainer.save_training_state()``."""
    location = parse_location(output_dir, "output_dir")
    if not trainer.current_run.window.is_between_updates:
        raise RuntimeError(
            "A training state can only be saved between updates. Save it in on_train_step_checkpoint or "
            "on_epoch_checkpoint."
        )
    if trainer.progress.is_mid_epoch and trainer.current_run.data.seed is None:
        raise RuntimeError(
            "The order of this epoch does not follow from a seed, so a run could not resume in the middle of it. Give "
            "the trainer a seed or a SaveTrainingStateCallback, or save in on_epoch_checkpoint."
        )
    check_states_are_possible(trainer.accelerator)
    with _timed(trainer):
        if writer is not None:
            writer.wait()  # the new copy reuses the writer's memory
        kwargs = dict(checkpoint_kwargs or {})

        def write(ranks: Ranks, captured: CapturedState) -> None:
            write_state(location, ranks, captured)
            if then is not None:
                then()

        if writer is None:
            trainer.ranks.repeatable(lambda: write(trainer.ranks, capture(trainer, kwargs, created_weights, sharded)))
        else:
            captured = capture(trainer, kwargs, created_weights, sharded).to_host(writer.memory)
            writer.start(partial(write, writer.ranks, captured))


def load_training_state(trainer: TrainerLike, input_dir: StrPath) -> StateDict:
    """Carry out ``Trainer.load_training_state()``."""
    resumed, location = trainer.current_run.resumed, parse_location(input_dir, "input_dir")
    if resumed is not None and resumed.directory == location:  # the run has read this state, and finishes restoring it
        state = resumed
        restore(trainer, state, with_scheduler=not trainer.current_run.schedule.is_recreated)
    else:
        state = read_state(location, trainer.ranks)
        options = describe_optimizers(trainer)
        restore(trainer, state)
        finish_restoring(trainer, state)
        if changes := describe_loaded(trainer, options, os.fspath(input_dir)):
            trainer.print(f"{changes} To train with this program's options, set them again.")
        prepared = trainer.prepared_model
        attributes.set_optimizer_modes(trainer, training=prepared is not None and prepared.trains)
    return {"current_epoch": trainer.run_history.current_epoch, **state.metadata, **state.shared["extra"]}
