"""Weights and training states, and writing files."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from pytorch_accel_lite.base.modules import without_compile
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.checkpoint.disk.atomic_files import replacing
from pytorch_accel_lite.checkpoint.disk.background_writer import BackgroundWriter
from pytorch_accel_lite.checkpoint.disk.checkpoint_files import LEFT_OUT
from pytorch_accel_lite.checkpoint.disk.checksums import verify
from pytorch_accel_lite.checkpoint.disk.shards import find_tensors, first_holder, is_sharded_tensor
from pytorch_accel_lite.checkpoint.disk.torch_files import load_plain
from pytorch_accel_lite.checkpoint.models.frozen_weights import (
    check_has_trainable,
    leave_out_frozen,
    model_checksums,
    weight_checksums,
)
from pytorch_accel_lite.checkpoint.models.model_forms import is_of_peft
from pytorch_accel_lite.checkpoint.models.supported_engines import (
    check_states_are_possible,
    refuse_engines,
    refuse_fsdp1,
)
from pytorch_accel_lite.checkpoint.models.weights import full_state_dict, sharded_like, verify_weights
from pytorch_accel_lite.checkpoint.states.manifest import (
    MANIFEST,
    DamagedStateError,
    read_manifest,
    stored_checksum,
    verify_state,
)
from pytorch_accel_lite.checkpoint.states.state_files import MODEL, open_state, read_weights
from pytorch_accel_lite.checkpoint.states.state_store import remove_old_states, state_name
from pytorch_accel_lite.checkpoint.stores_by_url import open_store, store_of
from pytorch_accel_lite.run.step_division import DIVISIONS
from pytorch_accel_lite.run.trained_objects import (
    SavedBeside,
    buffers_beside_model,
    find_saved_beside,
    loose_parameters,
    saved_optimizers,
    trained_objects,
    unsaved_attribute_names,
)

__all__ = [
    "BackgroundWriter", "DIVISIONS", "DamagedStateError", "FROZEN", "LEFT_OUT", "MANIFEST", "MODEL", "SavedBeside",
    "buffers_beside_model", "check_has_trainable", "check_states_are_possible", "every_part_is_held",
    "find_saved_beside", "find_tensors", "full_state_dict", "is_of_peft", "is_of_timm", "leave_out_frozen",
    "load_plain", "local_copy", "loose_parameters", "model_checksums", "open_state", "open_store", "read_manifest",
    "read_weights", "refuse_engines", "refuse_fsdp1", "remove_old_states", "saved_optimizers", "sharded_like",
    "state_name", "stored_checksum", "trained_objects", "unsaved_attribute_names", "verify_state", "verify_weights",
    "weight_checksums", "without_compile", "write_bytes",
]  # fmt: skip

FROZEN = LEFT_OUT  # its earlier name


def is_of_timm(model: nn.Module) -> bool:
    """Whether a model was made by ``timm.create_model``, rather than being a part of such a model."""
    return "timm" in sys.modules and isinstance(getattr(model, "pretrained_cfg", None), Mapping)


def every_part_is_held(tensor: torch.Tensor, holders: Collection[int]) -> bool:
    """Whether each part of a tensor is in the memory of a process that is left. One that is not sharded is on all.

    Args:
        holders: the processes that are left of those in the meshes, by their ranks in these
    """
    if not is_sharded_tensor(tensor):
        return True
    positions = tensor.device_mesh.mesh
    coordinates = positions.new_ones(positions.shape).nonzero().tolist()
    return all(first_holder(tensor, coordinate, holders) is not None for coordinate in coordinates)


def local_copy(location: Path | str) -> AbstractContextManager[Path]:
    """Return a context of the directory of a state, or of a verified copy of a state in a store."""
    return nullcontext(location) if isinstance(location, Path) else store_of(location).fetch_state(location)


def load_verified(path: Path) -> Tree:
    """Load a single file written by ``torch.save``, after checking its content against its own checksums.

    Raises:
        ValueError: if the file is damaged, or cannot be loaded without running code
    """
    verify(path)
    return load_plain(path)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)
