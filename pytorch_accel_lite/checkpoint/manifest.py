"""The manifest of a training state: the sizes and checksums of its files, by which it is verified."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch

from pytorch_accel_lite.base.paths import StrPath
from pytorch_accel_lite.checkpoint.checksums import CHECKSUM, checksum, hash_files
from pytorch_accel_lite.checkpoint.files import hidden_name

#: Since version 2, checksums are those of pieces, and large tensors besides the weights are in a separate file.
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_FILE_CHECKSUM = "sha256"  # of a file in states of format 1


class DamagedStateError(ValueError):
    """A training state is damaged. The message names the file."""


def manifest_text(entries: list[dict[str, Any]], metadata: dict[str, Any]) -> str:
    """Return the manifest of a state.

    :param entries: entries of each rank's files
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
    """Return the path to which a state is moved while a new one of the same name replaces it."""
    return directory.with_name(hidden_name(directory.name, "previous"))


def recover(directory: Path) -> None:
    """Restore the name of a state whose replacement was interrupted because the process was killed."""
    if not directory.exists() and previous_path(directory).exists():
        os.rename(previous_path(directory), directory)


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
        current = checksums[name] if CHECKSUM in entry else checksum(directory / name)
        if current != stored_checksum(entry):
            raise DamagedStateError(
                f"{os.fspath(directory / name)!r} is damaged: its content does not match its checksum."
            )
    return manifest


def stored_checksum(entry: Mapping[str, Any]) -> str:
    """Return the checksum of a file from its entry in the manifest."""
    stored: str = entry.get(CHECKSUM) or entry[_FILE_CHECKSUM]
    return stored


def catch_damage(verify: Callable[[], dict[str, Any]]) -> dict[str, Any] | DamagedStateError:
    """Return a verified manifest, or the error if the state is damaged, so that all ranks can raise the same error."""
    try:
        return verify()
    except DamagedStateError as error:
        return error
