"""The trainer's methods for saving checkpoints, weights and training states."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from torch import nn

from pytorch_accel_lite.base.arguments import check_dict
from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.missing_extensions import missing_extension_text
from pytorch_accel_lite.base.paths import PathOrFile, StrPath, check_open_file, file_path, name_of, parse_location
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.checkpoint.disk.atomic_files import replacing
from pytorch_accel_lite.checkpoint.disk.background_writer import BackgroundWriter
from pytorch_accel_lite.checkpoint.disk.checkpoint_files import LEFT_OUT, write_checkpoint
from pytorch_accel_lite.checkpoint.disk.checksums import UNSEALED, seal
from pytorch_accel_lite.checkpoint.disk.safetensors_files import write_sealed, write_tensors
from pytorch_accel_lite.checkpoint.disk.shared_disks import check_on_all_ranks
from pytorch_accel_lite.checkpoint.models.frozen_weights import check_has_trainable, leave_out_frozen
from pytorch_accel_lite.checkpoint.models.model_forms import MODEL_FORMS, find_writer, write_in_form
from pytorch_accel_lite.checkpoint.models.states_of_trained_objects import (
    loss_state,
    names_beside_model,
    trained_object_states,
)
from pytorch_accel_lite.checkpoint.models.supported_engines import (
    check_states_are_possible,
    refuse_engines,
    refuse_fsdp1,
)
from pytorch_accel_lite.checkpoint.models.weights import WEIGHTS, full_state_dict, model_state
from pytorch_accel_lite.checkpoint.states.capture_and_restore import capture
from pytorch_accel_lite.checkpoint.states.manifest import entries_of_states
from pytorch_accel_lite.checkpoint.states.state_files import CapturedState
from pytorch_accel_lite.checkpoint.stores_by_url import open_folder, write_state
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.lost_processes import naming_call
from pytorch_accel_lite.run.ending import NonFiniteLossError
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.trained_objects import evaluating_optimizers, weights_are_finite

#: The entries that ``save_checkpoint()`` and ``load_checkpoint()`` give a meaning.
_ENTRIES_OF_CHECKPOINTS = frozenset(
    {
        "model_state_dict",
        "optimizer_state_dict",
        "scheduler_state_dict",
        "loss_func_state_dict",
        "attribute_state_dicts",
        LEFT_OUT,
    }
)
#: The ends of the names of files with weights, in other programs.
_SUFFIXES_OF_FILES = (".pt", ".pth", ".bin", ".ckpt", ".onnx")


def _warn_of_weights(trainer: TrainerLike, method: str) -> None:
    """Warn on the first process if the weights to save are not finite. Call it on every process."""
    with naming_call(trainer.ranks, f"{method}()"):
        are_finite = weights_are_finite(trainer)
    if not are_finite and trainer.accelerator.is_main_process:
        warn_outside(
            f"{method}() saves weights that are infinite or NaN, as they are after update {trainer.progress.update}. "
            "check_weights() raises an error instead."
        )


@contextmanager
def _timed(trainer: TrainerLike) -> Iterator[None]:
    """Count the time of a block as saving."""
    with trainer.callback_handler.timing("saving"), trainer.current_run.goodput.counting("saving"):
        yield


def _check_model(
    trainer: TrainerLike, method: str, argument: str, target: PathOrFile, writes: bool, trainable_only: bool
) -> nn.Module:
    """Check what a method is to save, and where; return the model.

    Args:
        argument: the method's name for ``target``
        writes: whether this process writes
    """
    with naming_call(trainer.ranks, f"{method}()"):
        check_on_all_ranks(trainer.ranks, lambda: check_open_file(argument, target, to_write=True) if writes else None)
    refuse_fsdp1(trainer.accelerator, f"{method}()")
    model = trainer.get_model(keep_torch_compile=False)
    if trainable_only:
        check_has_trainable(model)
    return model


def _check_entries(checkpoint_kwargs: StateDict | None, taken: Collection[str], called: str) -> StateDict:
    """Return a copy of a user's entries for a file, or raise an error if one has the name of an entry of the file."""
    kwargs = check_dict("checkpoint_kwargs", checkpoint_kwargs)
    if used := sorted(kwargs.keys() & taken):
        raise ValueError(
            f"checkpoint_kwargs: {called} has its own {listed([repr(name) for name in used])}. Give your "
            f"{'entry another name' if len(used) == 1 else 'entries other names'}."
        )
    return kwargs


def save_checkpoint(
    trainer: TrainerLike,
    save_path: PathOrFile,
    checkpoint_kwargs: StateDict | None,
    save_optimizer: bool,
    save_scheduler: bool,
    save_per_node: bool,
    trainable_only: bool,
) -> None:
    """Carry out ``Trainer.save_checkpoint()``."""
    target: PathOrFile = save_path
    if isinstance(save_path, (str, os.PathLike)):
        target = file_path("save_path", save_path, "a checkpoint")
    else:
        save_per_node = False
    kwargs = _check_entries(checkpoint_kwargs, _ENTRIES_OF_CHECKPOINTS, "a checkpoint")

    def attempt() -> None:
        writes = trainer.accelerator.is_local_main_process if save_per_node else trainer.accelerator.is_main_process
        if save_optimizer:
            refuse_engines(trainer.accelerator, "save_checkpoint(save_optimizer=True)", "Pass save_optimizer=False.")
        model = _check_model(trainer, "save_checkpoint", "save_path", target, writes, trainable_only)
        with _timed(trainer), evaluating_optimizers(trainer):
            _warn_of_weights(trainer, "save_checkpoint")
            weights = model_state(model, writes)
            checkpoint: StateDict = {"model_state_dict": weights}
            if writes and (left_out := leave_out_frozen(model, weights, only_quantised=not trainable_only)):
                checkpoint[LEFT_OUT] = left_out
            state = None if trainer.optimizer is None or not save_optimizer else trainer.optimizer.state_dict()
            if state is not None:  # an optimizer that is not created yet has no state
                checkpoint["optimizer_state_dict"] = full_state_dict(state, writes)
            if save_scheduler and trainer.scheduler is not None:
                checkpoint["scheduler_state_dict"] = trainer.scheduler.state_dict()
            if learned := loss_state(trainer):
                checkpoint["loss_func_state_dict"] = learned
            others = trainer.current_run.user_attributes.changed_modules(trainer)
            if states := trained_object_states(trainer, writes, save_optimizer, save_scheduler, others):
                checkpoint["attribute_state_dicts"] = states
            checkpoint.update(kwargs)
            trainer.ranks.barrier()  # other processes may still be reading the old file
            trainer.ranks.run_together(lambda: write_checkpoint(checkpoint, target) if writes else None)

    trainer.ranks.repeat_if_process_lost(attempt)


class SavedModel(NamedTuple):
    """A model in a directory that already has its weights.

    Args:
        folder: the directory; for a URL, a temporary directory whose files are then uploaded
        location: the path or URL passed to ``save_model()``
        trainable_only: whether frozen parameters were left out
        card_data: the argument of ``save_model()``; empty by default
    """

    folder: Path
    location: Path | str
    trainable_only: bool
    card_data: Mapping[str, object]


class CompanionWriter(Protocol):
    """Writes companion files, such as a description, beside the weights of each model that is saved in a directory."""

    def check(self, card_data: Mapping[str, object]) -> None:
        """Check the user's ``card_data`` on each process, before anything is saved.

        Raises:
            TypeError: if the data cannot be written; likewise ``ValueError``
        """

    def write(self, trainer: TrainerLike, saved: SavedModel) -> None:
        """Write the files. Called only on the first process."""


#: The writers of companion files by name, in the order of their calls. An extension adds its own.
COMPANION_WRITERS: dict[str, CompanionWriter] = {}


def save_model(
    trainer: TrainerLike, path: PathOrFile, *, trainable_only: bool, card_data: Mapping[str, object] | None
) -> None:
    """Carry out ``Trainer.save_model()``."""
    is_directory = isinstance(path, (str, os.PathLike)) and not os.fspath(path).endswith(".safetensors")
    if is_directory and trainer.accelerator.is_main_process:
        _warn_of_name_of_file(name_of(path))
    if card_data is not None:
        _check_card_data(card_data, None if is_directory else name_of(path))

    def attempt() -> None:
        location = parse_location(path) if isinstance(path, (str, os.PathLike)) else path
        writes = trainer.accelerator.is_main_process
        model = _check_model(trainer, "save_model", "path", path, writes, trainable_only)
        with _timed(trainer), evaluating_optimizers(trainer):
            _warn_of_weights(trainer, "save_model")
            weights = model_state(model, keep=writes)
            _say_what_is_unsaved(trainer, name_of(path))

            def write() -> None:
                if is_directory and isinstance(location, (Path, str)):
                    _write_directory(trainer, model, weights, location, trainable_only, card_data or {})
                else:
                    _write_file(model, weights, location, trainable_only)

            trainer.ranks.run_together(write, only_first=True)

    trainer.ranks.repeat_if_process_lost(attempt)


def _warn_of_name_of_file(path: str) -> None:
    """Warn of a directory of weights whose name looks like that of a file."""
    if path.endswith(_SUFFIXES_OF_FILES) and not os.path.isdir(path):
        warn_outside(
            f"path={path!r}: save_model() creates a folder with this name. For a single file, pass a path that ends in "
            ".safetensors, or call save_checkpoint()."
        )


def _check_card_data(card_data: Mapping[str, object], file: str | None) -> None:
    if file is not None:
        raise ValueError(
            f"card_data={card_data!r} is for a model card, but path={file!r} is one file, without a card. "
            "Pass the path of a directory, or omit card_data."
        )
    if not COMPANION_WRITERS:
        raise ValueError(f"card_data={card_data!r} {missing_extension_text('reports')}")
    for writer in COMPANION_WRITERS.values():
        writer.check(card_data)


def _write_directory(
    trainer: TrainerLike,
    model: nn.Module,
    weights: StateDict,
    location: Path | str,
    trainable_only: bool,
    card_data: Mapping[str, object],
) -> None:
    """Write a model in the form of its library, or its weights alone, and companion files."""
    writer = None if trainable_only else find_writer(trainer, model)
    if isinstance(location, Path) and location.is_file():
        raise ValueError(
            f"path={os.fspath(location)!r} is a file, but should be a directory for a model and its card. Pass another "
            "path, or move the file."
        )
    with open_folder(location) as folder:
        if writer is None:
            _write_file(model, weights, folder / WEIGHTS, trainable_only)
        else:
            write_in_form(writer, weights, folder)
        saved = SavedModel(folder, location, trainable_only, card_data)
        for companion in COMPANION_WRITERS.values():
            companion.write(trainer, saved)
    if writer is None and isinstance(location, Path):
        for form in MODEL_FORMS.values():
            form.clear(location, model)


def _write_file(model: nn.Module, weights: StateDict, location: Path | str | IO[bytes], trainable_only: bool) -> None:
    """Write the weights that are to be saved as safetensors, to a path, a URL or an open file."""
    left_out = leave_out_frozen(model, weights, only_quantised=not trainable_only)
    metadata = {LEFT_OUT: json.dumps(left_out)} if left_out else {}
    if not isinstance(location, (Path, str)):
        write_sealed(weights, location, metadata)
        return
    folder = location.parent if isinstance(location, Path) else location.rpartition("/")[0]
    with open_folder(folder) as directory, replacing(directory / os.path.basename(location)) as temporary:
        write_tensors(weights, temporary, {**UNSEALED, **metadata})
        seal(temporary)


def _say_what_is_unsaved(trainer: TrainerLike, name: str) -> None:
    others = trainer.current_run.user_attributes.changed_modules(trainer)
    if unsaved := [*names_beside_model(trainer), *others]:
        trainer.print(
            f"{name!r} holds the model alone, without what was trained besides it: "
            f"{listed(unsaved, 10)}. save_checkpoint() includes that."
        )


def check_weights(trainer: TrainerLike) -> None:
    """Check that the weights are finite, as ``Trainer.check_weights()`` describes."""
    if not weights_are_finite(trainer):
        raise NonFiniteLossError(
            f"Weights are infinite or NaN after update {trainer.progress.update}, and were not saved. Lower the "
            "learning rate, clip the gradients, or resume from an earlier state with SkipFailedBatchesCallback or "
            "GradientSpikeCallback."
        )


def save_training_state(
    trainer: TrainerLike,
    output_dir: StrPath,
    checkpoint_kwargs: StateDict | None,
    writer: BackgroundWriter | None,
    then: Callable[[], None] | None,
    created_weights: Mapping[str, int] | None,
    sharded: bool,
) -> None:
    """Carry out ``Trainer.save_training_state()``."""
    location = parse_location(output_dir, "output_dir")
    kwargs = _check_entries(checkpoint_kwargs, entries_of_states(), "a training state")
    if not trainer.current_run.training_run.window.is_between_updates:
        raise RuntimeError(
            "A training state can only be saved between updates. Save it in on_train_step_checkpoint or "
            "on_epoch_checkpoint."
        )
    if trainer.progress.is_mid_epoch and trainer.current_run.training_run.data.seed is None:
        raise RuntimeError(
            "The order of this epoch does not follow from a seed, so a run could not resume in the middle of it. Give "
            "the trainer a seed or a SaveTrainingStateCallback, or save in on_epoch_checkpoint."
        )
    check_states_are_possible(trainer.accelerator)
    with _timed(trainer):
        if writer is not None:
            writer.wait()  # the new copy reuses the writer's memory

        def write(ranks: Ranks, captured: CapturedState) -> None:
            write_state(location, ranks, captured)
            if then is not None:
                then()

        if writer is None:
            trainer.ranks.repeat_if_process_lost(
                lambda: write(trainer.ranks, capture(trainer, kwargs, created_weights, sharded))
            )
        else:
            captured = capture(trainer, kwargs, created_weights, sharded).to_host(writer.memory)
            writer.start(partial(write, writer.ranks, captured))
