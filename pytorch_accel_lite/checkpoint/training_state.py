"""A training state: a directory with everything needed to resume a run, which is either complete or does not exist.

It is written under a temporary name, and every file is synced. A manifest with the sizes and checksums of all files is
written last, and then the directory is renamed. Reading verifies everything first and runs no code from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import safetensors.torch
import torch

from pytorch_accel_lite.checkpoint.background import HostMemory
from pytorch_accel_lite.checkpoint.files import (
    FROZEN,
    StrPath,
    checksum,
    hash_files,
    load_plain,
    naming,
    open_tensors,
    remove,
    sync,
    write_plain,
    write_tensors,
)
from pytorch_accel_lite.checkpoint.shards import Parts, StoredTensor, find_tensors, restore_tensors, write_parts
from pytorch_accel_lite.distributed import Ranks

#: Since 2, checksums are those of pieces, and large tensors beside the weights are in a file of their own.
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
TRAINER = "trainer.pt"
TENSORS = "trainer.safetensors"
RANK = "rank{:05d}.pt"
SHARDS = "shards{:05d}.safetensors"
#: In the name of a sharded tensor of the model, which other tensors follow by their own names.
SHARD_OF_MODEL = "model."
_CHECKSUM = "sha256_of_pieces"
_WHOLE_CHECKSUM = "sha256"  # of a file in states of format 1
_NUMBERS = "numbers"  # marks a list of numbers that is stored as a tensor


class DamagedStateError(ValueError):
    """A training state is damaged. The message names the file."""


@dataclass
class TrainingState:
    """The contents of a training state, except the weights.

    :param metadata: facts about the run from the manifest: progress, processes, versions ...
    :param shared: state shared by all ranks: optimizer, scheduler, history, callbacks ...
    :param local: state of this rank: its generators and its part of the running losses; ``None`` if the state was saved
        by a different number of processes
    :param weights: the weights, if they have been read already: nothing is left of the copy of a remote state
    :param tensors: large tensors, and sharded ones, in open files, by name; their places in ``shared`` are marked
    """

    directory: Path | str
    metadata: dict[str, Any]
    shared: dict[str, Any]
    local: dict[str, Any] | None = None
    weights: dict[str, torch.Tensor] | None = None
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def read_weights(self, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the state of the model, by name.

        :param like: the weights of a model, like which those saved in shards are sharded; by default they are whole
        """
        weights = read_model(Path(self.directory)) if self.weights is None else self.weights
        sharded = {
            name.removeprefix(SHARD_OF_MODEL): tensor.read((like or {}).get(name.removeprefix(SHARD_OF_MODEL)))
            for name, tensor in self.tensors.items()
            if name.startswith(SHARD_OF_MODEL)
        }
        return {**weights, **sharded, **self.shared["model_extra"]}

    def read_tensors(self, find_like: Callable[[tuple[Any, ...]], Any] = lambda keys: None) -> None:
        """Read the large and the sharded tensors in ``shared``.

        :param find_like: returns the tensor like which to shard that for a path of keys; by default all are whole
        """
        self.shared = restore_tensors(self.shared, self.tensors, find_like)


@dataclass
class CapturedState:
    """The contents that this rank writes to a training state; only ``local`` on ranks other than the first.

    :param parts: the parts of sharded tensors that this rank writes; ``None`` if they have been gathered
    :param weights: tensors of the model by name, tied ones once
    :param tied: the other names of tied weights, mapped to the names under which they are kept
    :param tensors: large tensors by name, whose places in ``shared`` are marked
    """

    local: dict[str, Any]
    parts: Parts | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_host(self, memory: HostMemory) -> CapturedState:
        """Return a copy in host memory that later updates do not change, but the next copy to that memory does."""
        return CapturedState(**memory.copy(vars(self)))


def write_directory(directory: Path, ranks: Ranks, captured: CapturedState) -> None:
    """Write a training state to a directory. All ranks take part, and all raise an error if one fails.

    An existing state of this name is replaced once the new one is complete.

    :raises OSError: if it cannot be written; an existing state is left unchanged
    """
    temporary = directory.with_name(f".{directory.name}.tmp")

    def make_empty() -> None:
        remove(temporary)
        temporary.mkdir(parents=True)

    try:
        ranks.run_together(make_empty, only_first=True)
        entries = ranks.run_together(lambda: write_files(temporary, ranks.rank, captured))
        ranks.run_together(lambda: _commit(temporary, directory, entries, captured.metadata), only_first=True)
    except BaseException:
        if ranks.rank == 0:
            remove(temporary)
        raise


def write_files(directory: Path, rank: int, captured: CapturedState) -> dict[str, dict[str, Any]]:
    """Write this rank's files and return their entries in the manifest."""
    writes: dict[str, Callable[[Path], None]] = {RANK.format(rank): partial(write_plain, captured.local)}
    if captured.parts is not None:
        writes[SHARDS.format(rank)] = partial(write_parts, captured.parts)
    if rank == 0:
        writes[TRAINER] = partial(write_plain, captured.shared)
        if captured.tensors:
            writes[TENSORS] = partial(write_tensors, captured.tensors)
        writes[MODEL] = partial(write_tensors, captured.weights, metadata=captured.tied)
    paths = [directory / name for name in writes]
    for path in paths:
        writes[path.name](path)
    with ThreadPoolExecutor(1, "hashing") as pool:
        hashing = pool.submit(hash_files, paths)
        for path in paths:
            sync(path)
        checksums = hashing.result()
    return {path.name: {"size": path.stat().st_size, _CHECKSUM: checksums[path.name]} for path in paths}


def manifest_text(entries: list[dict[str, Any]], metadata: dict[str, Any]) -> str:
    """Return the manifest of a state.

    :param entries: those of each rank's files
    """
    manifest = {
        "format_version": FORMAT_VERSION,
        "versions": {"torch": str(torch.__version__), "accelerate": accelerate.__version__},
        "files": {name: entry for of_rank in entries for name, entry in of_rank.items()},
        **metadata,
    }
    manifest["checksum"] = _manifest_checksum(manifest)
    return json.dumps(manifest, indent=2)


def _commit(temporary: Path, directory: Path, entries: list[dict[str, Any]], metadata: dict[str, Any]) -> None:
    with naming(temporary / MANIFEST):
        (temporary / MANIFEST).write_text(manifest_text(entries, metadata))
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
        raise _no_manifest(directory) from None
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


def _no_manifest(directory: Path) -> ValueError:
    """Return the error about a directory that is no training state."""
    name = os.fspath(directory)
    if any(directory.glob("random_states_*.pkl")):
        return ValueError(
            f"{name!r} is a training state of Accelerate, as written by pytorch-accelerated, which lacks what is "
            "needed to resume a run here. Start a new run from its model.safetensors; or load it there and save it "
            "with save_checkpoint(), whose files load_checkpoint() reads here."
        )
    states = sorted(directory.glob(f"update-*/{MANIFEST}"))
    advice = f" Pass one of the states in it, such as {os.fspath(states[-1].parent)!r}." if states else ""
    return DamagedStateError(f"{name!r} is not a training state: it has no {MANIFEST}.{advice}")


def verify_state(directory: StrPath) -> dict[str, Any]:
    """Check that a state is complete and every byte is intact, and return its manifest.

    :raises DamagedStateError: if it is damaged; names the file
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    entries = manifest["files"]
    for name in entries:
        if not (directory / name).is_file():
            raise DamagedStateError(f"{os.fspath(directory / name)!r} is missing.")
    checksums = hash_files(directory / name for name in entries)
    for name, entry in entries.items():
        current = checksums[name] if _CHECKSUM in entry else checksum(directory / name)
        if current != stored_checksum(entry):
            raise DamagedStateError(
                f"{os.fspath(directory / name)!r} is damaged: its content does not match its checksum."
            )
    return manifest


def stored_checksum(entry: Mapping[str, Any]) -> str:
    """Return the checksum of a file from its entry in the manifest."""
    stored: str = entry.get(_CHECKSUM) or entry[_WHOLE_CHECKSUM]
    return stored


def read_directory(directory: Path, ranks: Ranks) -> TrainingState:
    """Verify a state, once in the job, and read everything except the weights. All ranks take part.

    :raises DamagedStateError: on all ranks, if it is damaged; names the file
    """
    manifest = ranks.broadcast_object(lambda: or_damage(lambda: verify_state(directory)))
    if isinstance(manifest, DamagedStateError):
        raise manifest
    return read_verified(directory, manifest, ranks)


def or_damage(verify: Callable[[], dict[str, Any]]) -> dict[str, Any] | DamagedStateError:
    """Return a verified manifest, or the error that the state is damaged, for all ranks to raise the same."""
    try:
        return verify()
    except DamagedStateError as error:
        return error


def read_verified(directory: Path, metadata: dict[str, Any], ranks: Ranks) -> TrainingState:
    """Read everything except the weights of a state whose files are intact."""
    state = open_state(directory, metadata)
    if metadata["world_size"] == ranks.world_size:
        state.local = load_plain(directory / RANK.format(ranks.rank))
    return state


def open_state(directory: Path, metadata: dict[str, Any]) -> TrainingState:
    """Read what is shared by all ranks, except the weights. Files of large tensors are opened, but not read."""
    names = [name for name in sorted(metadata["files"]) if name == TENSORS or name.startswith("shards")]
    shared = load_plain(directory / TRAINER)
    shared["history"] = unpack_numbers(shared["history"])
    return TrainingState(directory, metadata, shared, tensors=find_tensors(directory / name for name in names))


def read_learned(directory: StrPath) -> dict[str, Any]:
    """Return what a training state has learned, as the content of a checkpoint without optimizers and schedulers.

    :raises DamagedStateError: if the state is damaged; names the file
    """
    state = open_state(Path(directory), verify_state(directory))
    weights = state.read_weights()
    state.read_tensors()
    return {
        "model_state_dict": weights,
        "loss_func_state_dict": state.shared.get("loss_func", {}),
        "attribute_state_dicts": state.shared.get("attributes", {}),
        FROZEN: state.shared.get(FROZEN, {}),
    }


def read_model(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a training state, by all their names."""
    weights = safetensors.torch.load_file(directory / MODEL)
    _, metadata = open_tensors(directory / MODEL)
    tied = metadata.items() - {("format", "pt")}  # the format, not another name of a tensor "pt"
    return weights | {name: weights[kept] for name, kept in tied}


def pack_numbers(value: Any) -> Any:
    """Return nested dicts in which long lists of floats or integers are tensors: one by one, they would take long."""
    if isinstance(value, Mapping):
        return {name: pack_numbers(item) for name, item in value.items()}
    if type(value) is list and len(value) >= 16 and {*map(type, value)} in ({float}, {int}):
        numbers = np.asarray(value)
        if numbers.dtype in (np.float64, np.int64):  # not integers of more than 64 bits
            return _NUMBERS, torch.from_numpy(numbers)
    return value


def unpack_numbers(value: Any) -> Any:
    """Return what was given to :func:`pack_numbers`."""
    if isinstance(value, Mapping):
        return {name: unpack_numbers(item) for name, item in value.items()}
    return value[1].tolist() if isinstance(value, tuple) and value[:1] == (_NUMBERS,) else value
