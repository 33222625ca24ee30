"""The seam for the forms in which libraries save their models, for their own functions that load them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import safetensors.torch
import torch
from torch import nn

from pytorch_accel_lite.base.missing_extensions import missing_extension_text
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.checkpoint.disk.atomic_files import naming_file, replacing
from pytorch_accel_lite.checkpoint.disk.checksums import UNSEALED, seal
from pytorch_accel_lite.checkpoint.disk.safetensors_files import open_tensors, write_tensors
from pytorch_accel_lite.run.run import TrainerLike

#: The file of PEFT's adapters in a directory.
ADAPTERS = "adapter_model.safetensors"
#: Libraries whose forms an extension adds.
_LIBRARIES = {"diffusers", "peft", "timm", "transformers"}

#: Writes a model, with the given full weights, into an empty folder.
WriteModel: TypeAlias = Callable[[Mapping[str, torch.Tensor], Path], None]


class ModelForm:
    """The form in which a library saves its models."""

    def writer_of(self, trainer: TrainerLike, model: nn.Module) -> WriteModel | None:
        """Return a function that writes a model, with what belongs to it, in this form; ``None`` for other models.

        Called only on the first process.
        """
        raise NotImplementedError

    def read(self, directory: Path, model: nn.Module) -> StateDict | None:
        """Return the content of a checkpoint from weights that only this form can read; ``None`` for all others."""
        return None

    def clear(self, directory: Path, model: nn.Module) -> None:
        """Remove what was saved earlier in this form from a directory that now has all weights of the model."""


#: The forms by library, in the order in which they are tried. An extension adds its own.
MODEL_FORMS: dict[str, ModelForm] = {}


def find_writer(trainer: TrainerLike, model: nn.Module) -> WriteModel | None:
    """Return a function that writes a model in the form of its library, or ``None`` if it has none."""
    for form in MODEL_FORMS.values():
        if (write := form.writer_of(trainer, model)) is not None:
            return write
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    for library in sorted(_LIBRARIES & packages - MODEL_FORMS.keys()):
        warn_outside(
            f"Saving a model as {library} does {missing_extension_text('pretrained')} All weights are saved instead."
        )
    return None


def write_in_form(write: WriteModel, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Save a model in the form of its library. Each file is written atomically, safetensors with checksums.

    Args:
        weights: the full state of the model
    """
    with naming_file(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pretrained.", dir=directory) as temporary:
        new = Path(temporary)
        with naming_file(directory):
            write(weights, new)
        for path in sorted(path for path in new.rglob("*") if path.is_file()):
            with replacing(directory / path.relative_to(new)) as replacement:
                if path.suffix == ".safetensors":
                    _, metadata = open_tensors(path)
                    write_tensors(safetensors.torch.load_file(path), replacement, {**metadata, **UNSEALED})
                    seal(replacement)
                else:
                    shutil.copyfile(path, replacement)


def read_in_form(directory: Path, model: nn.Module) -> StateDict | None:
    """Return the content of a checkpoint from weights that only a library's form can read; ``None`` for all others.

    Raises:
        ValueError: if the extension that can read them is missing
    """
    for form in MODEL_FORMS.values():
        if (content := form.read(directory, model)) is not None:
            return content
    if (directory / ADAPTERS).is_file() and is_of_peft(model):
        raise ValueError(f"Loading {os.fspath(directory / ADAPTERS)!r} {missing_extension_text('pretrained')}")
    return None


def is_of_peft(model: nn.Module) -> bool:
    """Whether a model is from PEFT. Does not import it."""
    return "peft" in sys.modules and isinstance(model, getattr(sys.modules["peft"], "PeftModel", ()))


def base_of(model: nn.Module) -> str:
    """Return the name of the pretrained model that a model began with, as its library knows it; empty if unknown."""
    configs = getattr(model, "peft_config", {}) if is_of_peft(model) else {}
    names = [getattr(config, "base_model_name_or_path", None) for config in configs.values()]
    names.append(getattr(getattr(model, "config", None), "_name_or_path", None))
    return next((name for name in names if isinstance(name, str) and name), "")
