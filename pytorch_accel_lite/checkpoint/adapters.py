"""Saving the adapters of models of the PEFT library in its own format."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from pytorch_accel_lite.checkpoint.files import naming, sync
from pytorch_accel_lite.checkpoint.weights import listed

CONFIG = "adapter_config.json"
_CARD = "README.md"
_OF_FILES = {".safetensors", ".pt", ".pth", ".bin", ".ckpt"}


def check_directory(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Check that adapters can be saved to a path, which PEFT makes a directory.

    :raises ValueError: if it is a file, or the name of one
    """
    if Path(path).is_file() or Path(path).suffix in _OF_FILES:
        raise ValueError(
            f"path={os.fspath(path)!r} is a file, but the adapters of {type(model).__name__} are saved as PEFT does: "
            "in a directory. Pass the name of a directory."
        )


def save_adapters(model: Any, weights: Mapping[str, Any], directory: Path) -> None:
    """Save the adapters of a model by its ``save_pretrained``. Each file is written atomically, others are left alone.

    :param weights: the full state of the model
    :raises ValueError: if parameters are trained that belong to no adapter
    """
    _check_adapters_are_all(model)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.absolute().parent) as temporary:
        new = Path(temporary) / "adapters"
        new.mkdir()
        if (directory / _CARD).exists():  # PEFT updates it
            shutil.copy(directory / _CARD, new)
        with naming(directory):
            model.save_pretrained(str(new), state_dict=dict(weights))
        mode = new.stat().st_mode & 0o666  # safetensors creates files that only their owner can read
        for path in sorted(path for path in new.rglob("*") if path.is_file()):
            target = directory / path.relative_to(new)
            target.parent.mkdir(exist_ok=True)
            path.chmod(mode)
            sync(path)
            path.replace(target)


def _check_adapters_are_all(model: Any) -> None:
    from peft import get_peft_model_state_dict

    own = model.state_dict(keep_vars=True)
    saved: set[int] = set()
    for adapter in model.peft_config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # saving repeats these warnings
            state = get_peft_model_state_dict(model, own, adapter)
        saved |= {id(tensor) for tensor in state.values()}
    left_out = [
        name
        for name, parameter in model.named_parameters()
        # Of prompts and of AdaLoRA's matrices, PEFT saves what it computes from them.
        if parameter.requires_grad and id(parameter) not in saved and not re.search(r"^prompt_encoder\.|\.lora_", name)
    ]
    if left_out:
        raise ValueError(
            f"Adapters alone would be saved, but more is trained: {listed(left_out)}. Name those modules in "
            "modules_to_save of PEFT's config, freeze them, or save everything with trainable_only=False."
        )
