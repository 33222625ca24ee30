"""A training state: a directory with everything needed to resume a run, which is either complete or does not exist.

It is written under a temporary name, and every file is synced. A manifest with the sizes and checksums of all files is
written last, and then the directory is renamed. Reading verifies everything first and runs no code from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import safetensors
import safetensors.torch
import torch

from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.checkpoint.background import HostMemory
from pytorch_accel_lite.checkpoint.files import (
    FROZEN,
    FileHashes,
    StrPath,
    checksum,
    load_plain,
    naming,
    remove,
    sync,
    write_plain,
    write_tensors,
)
from pytorch_accel_lite.checkpoint.numbers import unpack_numbers
from pytorch_accel_lite.checkpoint.shards import OwnPieces, Piece, find_pieces, write_pieces
from pytorch_accel_lite.checkpoint.tensor_files import read_weights_like, restore_tensors
from pytorch_accel_lite.checkpoint.weights import without_compile
from pytorch_accel_lite.distributed import Ranks

#: Since 2, checksums are those of pieces, and large tensors beside the weights are in a file of their own.
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
TRAINER = "trainer.pt"
TENSORS = "trainer.safetensors"
RANK = "rank{:05d}.pt"
SHARDS = "shards{:05d}.safetensors"
_SHARDS = re.compile(r"shards\d+\.safetensors")
_CHECKSUM = "sha256_of_pieces"
_WHOLE_CHECKSUM = "sha256"  # of a file in states of format 1
_OF_ACCELERATE = (
    "{!r} is a training state of Accelerate, as written by pytorch-accelerated, which lacks what is needed to resume a "
    "run here. Start a new run from its weights, for example with "
    "model.load_state_dict(safetensors.torch.load_file('model.safetensors')); or load it there and save it with "
    "save_checkpoint(), whose files load_checkpoint() reads here."
)


class DamagedStateError(ValueError):
    """A training state is damaged. The message names the file."""


@dataclass
class TrainingState:
    """The contents of a training state, except the weights.

    :param metadata: facts about the run from the manifest: progress, processes, versions ...
    :param shared: state shared by all ranks: optimizer, scheduler, history, callbacks ...
    :param own: state of this rank: its generators and its part of the running losses; ``None`` if the state was saved
        by a different number of processes
    :param tensors: the weights, if they have been read already: nothing is left of the copy of a remote state
    :param pieces: large tensors, and the parts of sharded ones, in open files, by name; their places in ``shared`` are
        marked
    """

    directory: Path | str
    metadata: dict[str, Any]
    shared: dict[str, Any]
    own: dict[str, Any] | None
    tensors: dict[str, torch.Tensor] | None = None
    pieces: dict[str, list[Piece]] = field(default_factory=dict)


@dataclass
class CapturedState:
    """The contents that this rank writes to a training state; only ``own`` on ranks other than the first.

    :param weights: tensors of the model by name, tied ones once
    :param tied: the other names of tied weights, mapped to the names under which they are kept
    :param tensors: large tensors by name, whose places in ``shared`` are marked
    :param pieces: the parts of sharded tensors that this rank writes; ``None`` if they have been gathered
    """

    weights: dict[str, torch.Tensor]
    tied: dict[str, str]
    tensors: dict[str, torch.Tensor]
    shared: dict[str, Any]
    own: dict[str, Any]
    metadata: dict[str, Any]
    pieces: OwnPieces | None = None

    def to_host(self, memory: HostMemory) -> CapturedState:
        """Return a copy in host memory that later updates do not change, but the next copy to that memory does."""
        return CapturedState(**memory.copy(vars(self)))


def write_state(directory: Path, ranks: Ranks, snapshot: CapturedState) -> None:
    """Write a training state. All ranks take part, and all raise an error if one fails.

    An existing state of this name is replaced once the new one is complete.

    :raises OSError: if it cannot be written; an existing state is left unchanged
    """
    temporary = directory.with_name(f".{directory.name}.tmp")
    try:
        ranks.run_together(lambda: _make_empty(temporary), only_first=True)
        files = ranks.run_together(lambda: write_files(temporary, ranks.rank, snapshot))
        ranks.run_together(lambda: _commit(temporary, directory, files, snapshot.metadata), only_first=True)
    except BaseException:
        if ranks.rank == 0:
            remove(temporary)
        raise


def _make_empty(temporary: Path) -> None:
    remove(temporary)
    temporary.mkdir(parents=True)


def write_files(temporary: Path, rank: int, snapshot: CapturedState) -> dict[str, dict[str, Any]]:
    """Write this rank's files and return their entries in the manifest. They are hashed while others are written."""
    writes: dict[str, Callable[[Path], None]] = {RANK.format(rank): partial(write_plain, snapshot.own, synced=False)}
    if snapshot.pieces is not None:
        writes[SHARDS.format(rank)] = partial(write_pieces, snapshot.pieces)
    if rank == 0:
        writes[TRAINER] = partial(write_plain, snapshot.shared, synced=False)
        if snapshot.tensors:
            writes[TENSORS] = partial(write_tensors, snapshot.tensors, synced=False)
        writes[MODEL] = partial(write_tensors, snapshot.weights, metadata=snapshot.tied, synced=False)
    with FileHashes() as hashes:
        for name, write in writes.items():
            write(temporary / name)
            hashes.add(temporary / name)
        for name in writes:
            sync(temporary / name)
        return {
            name: {"size": (temporary / name).stat().st_size, _CHECKSUM: hashes.of(temporary / name)} for name in writes
        }


def manifest_text(files: list[dict[str, Any]], metadata: dict[str, Any]) -> str:
    """Return the manifest of a state.

    :param files: the entries of each rank's files
    """
    manifest = {
        "format_version": FORMAT_VERSION,
        "versions": {"torch": str(torch.__version__), "accelerate": accelerate.__version__},
        "files": {name: entry for of_rank in files for name, entry in of_rank.items()},
        **metadata,
    }
    manifest["checksum"] = _manifest_checksum(manifest)
    return json.dumps(manifest, indent=2)


def _commit(temporary: Path, directory: Path, files: list[dict[str, Any]], metadata: dict[str, Any]) -> None:
    with naming(temporary / MANIFEST):
        (temporary / MANIFEST).write_text(manifest_text(files, metadata))
    sync(temporary / MANIFEST)
    sync(temporary)
    previous = _previous(directory)
    if os.path.lexists(directory):
        remove(previous)
        os.rename(directory, previous)
    os.rename(temporary, directory)
    sync(directory.parent)
    remove(previous)


def _previous(directory: Path) -> Path:
    """Return the path to which a state is moved while a new one of the same name replaces it."""
    return directory.with_name(f".{directory.name}.previous")


def recover(directory: Path) -> None:
    """Restore the name of a state whose replacement was interrupted because the process was killed."""
    if not directory.exists() and _previous(directory).exists():
        os.rename(_previous(directory), directory)


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of a state.

    :raises FileNotFoundError: if the directory does not exist
    :raises NotADirectoryError: if it is a file
    :raises DamagedStateError: if it holds no state, or the manifest is damaged
    :raises ValueError: if it was written by a newer version of this library, or by another library
    """
    recover(directory)
    if directory.is_file():
        raise NotADirectoryError(
            f"{os.fspath(directory)!r} is a file, but a training state is a directory. To start from the weights of a "
            "checkpoint, call trainer.load_checkpoint(path) and then train() without resume_from."
        )
    if not directory.is_dir():
        raise FileNotFoundError(f"There is no training state at {os.fspath(directory)!r}.")
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        if next(directory.glob("random_states_*.pkl"), None) is not None:
            raise ValueError(_OF_ACCELERATE.format(os.fspath(directory))) from None
        states = sorted(directory.glob(f"update-*/{MANIFEST}"))
        advice = f" Pass one of the states in it, such as {os.fspath(states[-1].parent)!r}." if states else ""
        raise DamagedStateError(
            f"{os.fspath(directory)!r} is not a training state: it has no {MANIFEST}.{advice}"
        ) from None
    except (ValueError, IsADirectoryError) as error:
        raise DamagedStateError(f"{os.fspath(path)!r} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("checksum") != _manifest_checksum(manifest):
        raise DamagedStateError(f"{os.fspath(path)!r} is damaged: its content does not match its checksum.")
    if manifest["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"The training state {os.fspath(directory)!r} has format {manifest['format_version']}; this version of "
            f"pytorch_accel_lite reads up to {FORMAT_VERSION}. Upgrade pytorch_accel_lite."
        )
    return manifest


def verify_state(directory: StrPath) -> dict[str, Any]:
    """Check that a state is complete and every byte is intact, and return its manifest.

    :raises DamagedStateError: if it is damaged; names the file
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    files = {directory / name: entry for name, entry in manifest["files"].items()}
    for path, entry in files.items():
        if not path.is_file():
            raise DamagedStateError(f"{os.fspath(path)!r} is missing.")
        size = path.stat().st_size
        if size != entry["size"]:
            raise DamagedStateError(f"{os.fspath(path)!r} is damaged: it has {size} bytes instead of {entry['size']}.")
    with FileHashes() as hashes:
        for path, entry in files.items():
            if _CHECKSUM in entry:
                hashes.add(path)
        for path, entry in files.items():
            found = hashes.of(path) if _CHECKSUM in entry else checksum(path)
            if found != stored_checksum(entry):
                raise DamagedStateError(f"{os.fspath(path)!r} is damaged: its content does not match its checksum.")
    return manifest


def stored_checksum(entry: Mapping[str, Any]) -> str:
    """Return the checksum of a file from its entry in the manifest."""
    stored: str = entry.get(_CHECKSUM) or entry[_WHOLE_CHECKSUM]
    return stored


def read_state(directory: Path, ranks: Ranks) -> TrainingState:
    """Verify a state, once in the job, and read everything except the weights."""
    return read_verified(directory, ranks.broadcast_object(lambda: verify_state(directory)), ranks)


def read_verified(directory: Path, metadata: dict[str, Any], ranks: Ranks) -> TrainingState:
    """Read everything except the weights of a state whose files are intact."""
    state = open_state(directory, metadata)
    if metadata["world_size"] == ranks.world_size:
        state.own = load_plain(directory / RANK.format(ranks.rank))
    return state


def open_state(directory: Path, metadata: dict[str, Any]) -> TrainingState:
    """Read what is shared by all ranks, except the weights. Files of large tensors are opened, but not read."""
    names = [name for name in sorted(metadata["files"]) if name == TENSORS or _SHARDS.fullmatch(name)]
    pieces = find_pieces(directory / name for name in names)
    shared = load_plain(directory / TRAINER)
    shared["history"] = unpack_numbers(shared["history"])
    return TrainingState(directory, metadata, shared, None, pieces=pieces)


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a training state, by all their names."""
    path = directory / MODEL
    weights = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, framework="pt") as file:
        names = file.metadata().items() - {("format", "pt")}  # the format, not another name of a tensor "pt"
    return weights | {name: weights[kept] for name, kept in names}


def read_weights(state: TrainingState, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of the model in a training state, by name.

    :param own: the weights of a model, like which those saved in shards are sharded; by default they are whole
    """
    weights = state.tensors
    if weights is None:
        assert isinstance(state.directory, Path)
        weights = read_tensors(state.directory)
    sharded = read_weights_like(state.pieces, own or {})
    return {**weights, **sharded, **state.shared["model_extra"]}


def restore_whole_tensors(state: TrainingState) -> None:
    """Read the tensors taken out of a state, other than the weights, each of them whole."""
    state.shared = restore_tensors(state.shared, state.pieces, lambda path: None)


def read_learned(directory: StrPath) -> dict[str, Any]:
    """Return what a training state has learned, as the content of a checkpoint without optimizers and schedulers.

    :raises DamagedStateError: if the state is damaged; names the file
    """
    state = open_state(Path(directory), verify_state(directory))
    weights = read_weights(state)
    restore_whole_tensors(state)
    return {
        "model_state_dict": weights,
        "loss_func_state_dict": state.shared.get("loss_func", {}),
        "attribute_state_dicts": state.shared.get("attributes", {}),
        FROZEN: state.shared.get(FROZEN, {}),
    }


def restore_sharded_tensors(state: TrainingState, trainer: TrainerLike) -> None:
    """Read the tensors taken out of a state, other than the weights: sharded ones as the trainer's parameters are."""
    own = dict(_names(trainer))
    groups = getattr(trainer.optimizer, "param_groups", ())
    optimized = dict(enumerate(parameter for group in groups for parameter in group["params"]))

    def find(path: tuple[Any, ...]) -> Any:
        if path[:2] == ("optimizer", "state"):
            return optimized.get(path[2])
        return own.get(path[-1])  # averaged weights, for example

    state.shared = restore_tensors(state.shared, state.pieces, find)


def _names(trainer: TrainerLike) -> Iterator[tuple[str, Any]]:
    yield from without_compile(trainer.get_model(keep_torch_compile=False).state_dict()).items()
