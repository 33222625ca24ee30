"""Weights as a directory of safetensors files with an index, the form in which large models are published.

Whole tensors are divided over files of limited size, and the files over the processes: each gathers one tensor at a
time, and holds only those of the file that it is about to write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from pytorch_accel_lite.checkpoint.files import FROZEN, naming, remove, sync, write_tensors
from pytorch_accel_lite.checkpoint.shards import find_tensors
from pytorch_accel_lite.checkpoint.weights import full_state_dict, without_compile
from pytorch_accel_lite.distributed import Ranks

INDEX = "model.safetensors.index.json"
_FILE = "model-{:05d}-of-{:05d}.safetensors"
_MANIFEST = "manifest.json"  # of a training state
_MOST_BYTES = 5_000_000_000  # in a file, as the Hugging Face Hub has it


def is_directory(path: str | os.PathLike[str], sharded: bool) -> bool:
    """Whether weights are to be saved in a directory: an existing one, or for a sharded model a name without suffix."""
    return Path(path).is_dir() or os.fspath(path).endswith(os.sep) or (sharded and not Path(path).suffix)


def save_exported(
    model: nn.Module, weights: Mapping[str, Any], directory: Path, ranks: Ranks, frozen: Mapping[str, int]
) -> None:
    """Save weights, which may be sharded, as safetensors files with an index. Call it on every process.

    Each file replaces its predecessor atomically, and the index comes last.

    :param weights: tensors by name; tied ones are saved under their first name
    :param frozen: fingerprints of frozen weights that were left out
    :raises OSError: if it cannot be written
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # Accelerate needs it, but imports it late, too

    first = _first_names(model)
    weights = {name: value for name, value in weights.items() if first.get(name, name) == name}
    sizes = {name: value.numel() * value.element_size() for name, value in weights.items()}
    total = sum(sizes.values())
    files = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern="{suffix}",
        max_shard_size=min(_MOST_BYTES, -(-total // ranks.world_size)),
    ).filename_to_tensors
    names = {_FILE.format(number, len(files)): keys for number, keys in enumerate(files.values(), 1)}
    temporary = directory / ".saving"
    ranks.run_together(lambda: _make_empty(temporary), only_first=True)
    for number, (name, keys) in enumerate(names.items()):
        is_mine = number % ranks.world_size == ranks.rank
        whole = full_state_dict({key: weights[key] for key in keys}, keep=is_mine)
        ranks.run_together(partial(write_tensors, whole, temporary / name) if is_mine else lambda: None)
    metadata: dict[str, Any] = {"total_size": total}
    if frozen:
        metadata[FROZEN] = json.dumps(frozen)
    index = {"metadata": metadata, "weight_map": {key: name for name, keys in names.items() for key in keys}}
    ranks.run_together(lambda: _finish(model, temporary, directory, index), only_first=True)


def _make_empty(directory: Path) -> None:
    remove(directory)
    directory.mkdir(parents=True)


def _finish(model: nn.Module, temporary: Path, directory: Path, index: dict[str, Any]) -> None:
    """Move the files into place, and remove those of an earlier save."""
    if hasattr(model, "save_pretrained"):  # of transformers: from_pretrained() reads the configurations, too
        for name in ("config", "generation_config"):
            config: Any = getattr(model, name, None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(temporary)
    with naming(temporary / INDEX):
        (temporary / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    written = sorted((path.name for path in temporary.iterdir()), key=lambda name: (name == INDEX, name))
    for name in written:
        sync(temporary / name)
        (temporary / name).replace(directory / name)
    for path in directory.glob("model-*-of-*.safetensors"):
        if path.name not in written:
            path.unlink()
    temporary.rmdir()
    sync(directory)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return, for each name of a parameter or buffer, the first name of the same one: tied weights have several."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in without_compile(dict(named)).items()}


def read_exported(directory: Path, model: nn.Module) -> dict[str, Any]:
    """Read weights from a directory of safetensors files, each process only what it needs for a sharded model.

    :return: the content of a checkpoint. Weights that are tied in the model have all their names.
    :raises FileNotFoundError: if the directory has no weights, or not all that its index names
    :raises ValueError: if a file is damaged, or the directory is a training state
    """
    if (directory / _MANIFEST).is_file():
        raise ValueError(
            f"{os.fspath(directory)!r} is a training state. Load it with trainer.load_training_state(directory), or "
            "resume the run with train(resume_from=directory)."
        )
    index = directory / INDEX
    content = json.loads(index.read_text()) if index.is_file() else {}
    names = sorted(set(content.get("weight_map", {}).values()))
    files = [directory / name for name in names] or sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"There is no checkpoint at {os.fspath(directory)!r}: it has no weights as safetensors."
        )
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{missing[0]} is missing in {os.fspath(directory)!r}, whose index names it.")
    own = without_compile(model.state_dict())
    weights = {name: stored.read(own.get(name)) for name, stored in find_tensors(files).items()}
    first = _first_names(model)
    by_first_name = {first[name]: value for name, value in weights.items() if name in first}
    for name, kept in first.items():
        if name in own and kept in by_first_name:
            weights.setdefault(name, by_first_name[kept])
    return {"model_state_dict": weights, FROZEN: json.loads(content.get("metadata", {}).get(FROZEN, "{}"))}
