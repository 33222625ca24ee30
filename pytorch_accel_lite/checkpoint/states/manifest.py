"""The manifest of a training state: the sizes and checksums of its files, for verification."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeGuard, TypeVar

import accelerate
import torch

from pytorch_accel_lite.base.display import short_repr
from pytorch_accel_lite.base.paths import StrPath
from pytorch_accel_lite.base.types import JsonObject
from pytorch_accel_lite.checkpoint.disk.atomic_files import hidden_name
from pytorch_accel_lite.checkpoint.disk.checksums import CHECKSUM, checksum, hash_files
from pytorch_accel_lite.run.step_division import DIVISIONS

T = TypeVar("T")

#: Since version 2, checksums are computed by pieces, and large tensors besides the weights are in a separate file.
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_FILE_CHECKSUM = "sha256"  # key of a file's checksum in states of format 1
#: The counts of progress in states of every version. Newer versions may have more.
_COUNTS = ("epoch", "epochs_completed", "step", "update", "samples_in_epoch", "samples")


class DamagedStateError(ValueError):
    """A training state is damaged. The message names the file."""


def manifest_text(entries: list[JsonObject], metadata: JsonObject) -> str:
    """Return the manifest of a state.

    Args:
        entries: the entries of each rank's files
    """
    manifest = {
        "format_version": FORMAT_VERSION,
        "versions": {"torch": str(torch.__version__), "accelerate": accelerate.__version__},
        "files": {name: entry for rank_entries in entries for name, entry in rank_entries.items()},
        **metadata,
    }
    manifest["checksum"] = _manifest_checksum(manifest)
    return json.dumps(manifest, indent=2)


def previous_path(directory: Path) -> Path:
    """Return the path to which a state is moved while a new state of the same name replaces it."""
    return directory.with_name(hidden_name(directory.name, "previous"))


def recover(directory: Path) -> None:
    """Restore the name of a state whose replacement was interrupted because the process was killed."""
    if not directory.exists() and previous_path(directory).exists():
        try:
            os.rename(previous_path(directory), directory)
        except OSError:
            if not directory.exists():  # otherwise another process has restored it, or completed the replacement
                raise


def _manifest_checksum(manifest: JsonObject) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> JsonObject:
    """Return the manifest of a state.

    Raises:
        FileNotFoundError: if the directory does not exist
        NotADirectoryError: if the path is a file
        DamagedStateError: if the directory holds no state, or the manifest is damaged
        ValueError: if the state was written by a newer version of this library, or by another library
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
    if not _is_integer(manifest.get("format_version")):
        raise DamagedStateError(f"{os.fspath(path)!r} is damaged: {_odd('format_version', manifest)}.")
    if manifest["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"The training state {os.fspath(directory)!r} has format {manifest['format_version']}; this version of "
            f"pytorch_accel_lite reads up to {FORMAT_VERSION}. Upgrade pytorch_accel_lite."
        )
    if problem := _find_odd_field(manifest):
        raise DamagedStateError(f"{os.fspath(path)!r} is damaged: {problem}.")
    return manifest


def _is_integer(value: object) -> TypeGuard[int]:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_integer_or_none(value: object) -> bool:
    return value is None or _is_integer(value)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value) and abs(value) < 2**40


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def _is_count(value: object) -> bool:
    return _is_integer(value) and value >= 0


def _is_progress(value: object) -> bool:
    return isinstance(value, dict) and all(_is_count(value.get(name)) for name in _COUNTS)


#: The checks of fields: of those that every state has, and of those that only newer states have.
_REQUIRED: dict[str, Callable[[object], bool]] = {
    "saved_at": _is_time,
    "progress": _is_progress,
    "world_size": lambda value: _is_integer(value) and value > 0,
    "seed": _is_integer_or_none,
    "data_seed": _is_integer_or_none,
    "stop_reason": _is_text_or_none,
    "run_config": _is_dict,
}
_OPTIONAL: dict[str, Callable[[object], bool]] = {
    "versions": _is_dict,
    "goodput": lambda value: isinstance(value, dict) and all(map(_is_time, value.values())),
    "machine": _is_dict,
    "stopped_by": _is_text_or_none,
    "epoch_phase": _is_integer,
    "first_epoch": _is_integer,
    "generation": _is_integer,
    "folder": lambda value: isinstance(value, str),
}


def entries_of_states() -> set[str]:
    """Return the names of all fields of manifests, and what else ``load_training_state()`` returns of itself."""
    unchecked = {"format_version", "files", "checksum", "interrupted"}
    return {"current_epoch", *unchecked, *_REQUIRED, *_OPTIONAL, *DIVISIONS}


def _find_odd_field(manifest: JsonObject) -> str:
    """Return what is wrong with a field of a manifest whose checksum matches; an empty text if nothing is wrong."""
    optional = {**_OPTIONAL, **dict.fromkeys(DIVISIONS, _is_integer_or_none)}
    checks = {**_REQUIRED, **{name: check for name, check in optional.items() if name in manifest}}
    for name, check in checks.items():
        if name not in manifest or not check(manifest[name]):
            return _odd(name, manifest)
    files = manifest.get("files")
    if not isinstance(files, dict):
        return _odd("files", manifest)
    for name, entry in files.items():
        if PurePosixPath(name).name != name:
            return f"it lists {name!r}, which is not the name of a file"
        if not (isinstance(entry, dict) and _is_integer(entry.get("size")) and _has_checksum(entry)):
            return f"its entry of the file {name!r} is {short_repr(entry)}"
    return ""


def _has_checksum(entry: JsonObject) -> bool:
    return isinstance(entry.get(CHECKSUM) or entry.get(_FILE_CHECKSUM), str)


def _odd(name: str, manifest: JsonObject) -> str:
    return f"its {name!r} is {short_repr(manifest[name])}" if name in manifest else f"it has no {name!r}"


def _no_manifest(directory: Path) -> ValueError:
    """Return the error about a directory that is not a training state."""
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


def verify_state(directory: StrPath) -> JsonObject:
    """Check that a state is complete and every byte is intact, and return its manifest.

    Raises:
        DamagedStateError: if it is damaged; names the file
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    entries = manifest["files"]
    for name in entries:
        if not (directory / name).is_file():
            raise DamagedStateError(f"{os.fspath(directory / name)!r} is missing.")
    checksums = hash_files(directory / name for name in entries)
    for name, entry in entries.items():
        current = checksums[name] if CHECKSUM in entry else checksum(directory / name)
        if current != stored_checksum(entry):
            raise DamagedStateError(
                f"{os.fspath(directory / name)!r} is damaged: its content does not match its checksum."
            )
    return manifest


def stored_checksum(entry: JsonObject) -> str:
    """Return the checksum of a file from its entry in the manifest."""
    stored: str = entry.get(CHECKSUM) or entry[_FILE_CHECKSUM]
    return stored


def catch_damage(read: Callable[[], T]) -> T | DamagedStateError:
    """Return the result of a read, or the error of a damaged state, so that all ranks raise the same one."""
    try:
        return read()
    except DamagedStateError as error:
        return error
