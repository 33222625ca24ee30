"""A training state: a directory with everything needed to resume a run, which is either complete or does not exist.

The directory is written under a temporary name, and every file is synced. A manifest with the sizes and checksums of
all files is written last; then the directory is renamed. Reading a state verifies all files first, and runs no code
from them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from pytorch_accel_lite.base.display import listed, short_repr
from pytorch_accel_lite.base.paths import StrPath
from pytorch_accel_lite.base.types import JsonObject, Keys, StateDict, Tree
from pytorch_accel_lite.checkpoint.disk.atomic_files import check_fences, hidden_name, naming_file, remove, sync
from pytorch_accel_lite.checkpoint.disk.background_writer import HostMemory
from pytorch_accel_lite.checkpoint.disk.checkpoint_files import LEFT_OUT
from pytorch_accel_lite.checkpoint.disk.checksums import CHECKSUM, hash_files
from pytorch_accel_lite.checkpoint.disk.extracted_tensors import restore_tensors
from pytorch_accel_lite.checkpoint.disk.safetensors_files import open_tensors, write_tensors
from pytorch_accel_lite.checkpoint.disk.shards import Parts, find_tensors, write_parts
from pytorch_accel_lite.checkpoint.disk.shared_disks import check_on_all_ranks, require_shared
from pytorch_accel_lite.checkpoint.disk.torch_files import load_plain, write_plain
from pytorch_accel_lite.checkpoint.states.manifest import (
    MANIFEST,
    DamagedStateError,
    catch_damage,
    manifest_text,
    previous_path,
    verify_state,
)
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.run.training_state import TrainingState

MODEL = "model.safetensors"
TRAINER = "trainer.pt"
TENSORS = "trainer.safetensors"
RANK = "rank{:05d}.pt"
SHARDS = "shards{:05d}.safetensors"
#: Prefix of the names of the model's sharded tensors.
SHARD_OF_MODEL = "model."
#: The keys in all states, of any version.
_IN_SHARED = ("optimizer", "scheduler", "scaler", "callbacks", "objects", "losses", "model_extra", "history")
_IN_LOCAL = ("losses", "generators")
_NUMBERS = "numbers"  # marks a list of numbers that is stored as a tensor


def read_weights(state: TrainingState, like: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return the state of the model, by name.

    Args:
        like: the weights of a model, whose sharding to use for weights saved in shards; by default, weights are not
            sharded
    """
    weights = read_model(Path(state.directory)) if state.weights is None else state.weights
    sharded = {
        name.removeprefix(SHARD_OF_MODEL): tensor.read((like or {}).get(name.removeprefix(SHARD_OF_MODEL)))
        for name, tensor in state.tensors.items()
        if name.startswith(SHARD_OF_MODEL)
    }
    return {**weights, **sharded, **state.shared["model_extra"]}


def read_tensors(state: TrainingState, find_like: Callable[[Keys], torch.Tensor | None] = lambda keys: None) -> None:
    """Read the large and the sharded tensors in ``shared``.

    Args:
        find_like: returns, for a path of keys, a tensor whose sharding to use; by default, tensors are not sharded
    """
    history = state.shared.pop("history")  # the history may be long, and has no tensors to read
    state.shared = restore_tensors(state.shared, state.tensors, find_like) | {"history": history}


@dataclass(eq=False, repr=False)
class CapturedState:
    """The contents that this rank writes to a training state; only ``local`` on ranks other than the first.

    Args:
        local: what each rank keeps for itself, such as the states of its generators
        parts: the parts of sharded tensors that this rank writes; ``None`` if sharded tensors have been gathered
        weights: tensors of the model by name; tied tensors once
        tied: the other names of tied weights, mapped to the names under which they are kept
        tensors: large tensors by name; ``shared`` has marks in their place
        shared: what is the same on all ranks, such as the state of the optimizer
        metadata: what can be read without loading the state, such as the progress
    """

    local: StateDict
    parts: Parts | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: StateDict = field(default_factory=dict)
    metadata: JsonObject = field(default_factory=dict)

    def to_host(self, memory: HostMemory) -> CapturedState:
        """Return a copy in host memory. Updates do not change it, but the next copy to that memory overwrites it."""
        return CapturedState(**memory.copy(vars(self)))


def write_directory(directory: Path, ranks: Ranks, captured: CapturedState) -> None:
    """Write a training state to a directory. All ranks take part, and all raise an error if one fails.

    An existing state of this name is replaced once the new one is complete.

    Raises:
        OSError: if it cannot be written; an existing state is left unchanged
    """
    temporary = directory.with_name(hidden_name(directory.name, "tmp"))

    def make_empty() -> None:
        remove(temporary)
        temporary.mkdir(parents=True)

    def write() -> dict[str, JsonObject]:
        require_shared(temporary, repr(os.fspath(directory.parent)))
        return write_files(temporary, ranks.rank, captured)

    try:
        ranks.run_together(make_empty, only_first=True)
        entries = ranks.run_together(write)
        ranks.run_together(lambda: _commit(temporary, directory, entries, captured.metadata), only_first=True)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename:  # the user does not know the temporary name
            error.filename = str(error.filename).replace(temporary.name, directory.name)
        if ranks.rank == 0:
            remove(temporary)
        raise


def write_files(directory: Path, rank: int, captured: CapturedState) -> dict[str, JsonObject]:
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
    return {path.name: {"size": path.stat().st_size, CHECKSUM: checksums[path.name]} for path in paths}


def _commit(temporary: Path, directory: Path, entries: list[JsonObject], metadata: JsonObject) -> None:
    with naming_file(temporary / MANIFEST):
        (temporary / MANIFEST).write_text(manifest_text(entries, metadata))
    sync(temporary / MANIFEST)
    sync(temporary)
    check_fences()
    while not _has_replaced(directory, temporary):
        pass
    sync(directory.parent)
    remove(previous_path(directory))


def _has_replaced(directory: Path, temporary: Path) -> bool:
    """Try to replace a state. It fails if meanwhile, another process has restored the name of the previous state."""
    previous = previous_path(directory)
    if os.path.lexists(directory):
        remove(previous)
        os.rename(directory, previous)
    try:
        os.rename(temporary, directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def read_directory(directory: Path, ranks: Ranks) -> TrainingState:
    """Verify a state, once in the job, and read everything except the weights. All ranks take part.

    Raises:
        DamagedStateError: on all ranks, if it is damaged; names the file
    """
    manifest = ranks.result_of_first(lambda: catch_damage(lambda: verify_state(directory)))
    if isinstance(manifest, DamagedStateError):
        raise manifest
    return read_verified(directory, manifest, ranks)


def read_verified(directory: Path, metadata: JsonObject, ranks: Ranks) -> TrainingState:
    """Read everything except the weights of a state with intact files. All ranks take part.

    Raises:
        DamagedStateError: on all ranks, if a file has the wrong content; names the file
    """

    def read() -> TrainingState:
        state = open_state(directory, metadata)
        if metadata["world_size"] == ranks.world_size:
            state.local = _load_part(directory / RANK.format(ranks.rank), _IN_LOCAL)
        return state

    return check_on_all_ranks(ranks, read)


def _load_part(path: Path, names: Iterable[str]) -> StateDict:
    """Load a file with a matching checksum, and check that it holds a dict with these keys.

    Raises:
        DamagedStateError: if it does not hold one; names the file
    """
    try:
        content = load_plain(path)
    except ValueError as error:
        raise DamagedStateError(str(error)) from error
    missing = [name for name in names if not isinstance(content, dict) or name not in content]
    if missing:
        held = ", ".join(map(repr, content)) if isinstance(content, dict) else short_repr(content)
        raise DamagedStateError(f"{os.fspath(path)!r} is damaged: it lacks {listed(missing)}, and holds {held}.")
    return content  # type: ignore[no-any-return]


def open_state(directory: Path, metadata: JsonObject) -> TrainingState:
    """Read the part shared by all ranks, except the weights. Files of large tensors are opened, but not read.

    Raises:
        DamagedStateError: if a file has the wrong content; names the file
    """
    for name in (MODEL, TRAINER):
        if name not in metadata["files"]:
            raise DamagedStateError(f"{os.fspath(directory / MANIFEST)!r} is damaged: it does not list {name!r}.")
    names = [name for name in sorted(metadata["files"]) if name == TENSORS or name.startswith("shards")]
    shared = _load_part(directory / TRAINER, _IN_SHARED)
    shared["history"] = unpack_numbers(shared["history"])
    return TrainingState(directory, metadata, shared, tensors=find_tensors(directory / name for name in names))


def read_learned(directory: StrPath) -> StateDict:
    """Return the learned part of a training state, in the form of a checkpoint without optimizers and schedulers.

    Raises:
        DamagedStateError: if the state is damaged; names the file
    """
    state = open_state(Path(directory), verify_state(directory))
    weights = read_weights(state)
    read_tensors(state)
    return {
        "model_state_dict": weights,
        "loss_func_state_dict": state.shared.get("loss_func", {}),
        "attribute_state_dicts": state.shared.get("attributes", {}),
        LEFT_OUT: state.shared.get(LEFT_OUT, {}),
    }


def read_model(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a training state, by all their names."""
    weights = safetensors.torch.load_file(directory / MODEL)
    _, metadata = open_tensors(directory / MODEL)
    tied = metadata.items() - {("format", "pt")}  # this entry is the format, not a tied tensor "pt"
    return weights | {name: weights[kept] for name, kept in tied}


def pack_numbers(value: Tree) -> Tree:
    """Return nested dicts with long lists of floats or integers as tensors, which are faster to write and read."""
    if isinstance(value, Mapping):
        return {name: pack_numbers(item) for name, item in value.items()}
    if type(value) is list and len(value) >= 16 and {*map(type, value)} in ({float}, {int}):
        numbers = np.asarray(value)
        if numbers.dtype in (np.float64, np.int64):  # unlike integers of more than 64 bits
            return _NUMBERS, torch.from_numpy(numbers)
    return value


def unpack_numbers(value: Tree) -> Tree:
    """Return the value that was passed to ``pack_numbers()``."""
    if isinstance(value, Mapping):
        return {name: unpack_numbers(item) for name, item in value.items()}
    return value[1].tolist() if isinstance(value, tuple) and value[:1] == (_NUMBERS,) else value
