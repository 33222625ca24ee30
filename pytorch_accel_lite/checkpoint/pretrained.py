"""The forms in which transformers and PEFT save their models, for their ``from_pretrained``."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pytorch_accel_lite.base.environment import warn_outside
from pytorch_accel_lite.base.text import listed
from pytorch_accel_lite.checkpoint.checksums import UNSEALED, seal
from pytorch_accel_lite.checkpoint.files import naming, open_tensors, replacing, write_tensors

#: The file of PEFT's adapters in a directory.
ADAPTERS = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_CARD = "README.md"  # of PEFT, in place of which there is ours


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is one of PEFT."""
    return _is_a(model, "peft", "PeftModel")


def has_own_form(model: nn.Module) -> bool:
    """Whether a model is saved in the form of its library; warns if that would leave out what is trained."""
    if has_adapters(model):
        if left_out := _trained_beside_adapters(model):
            warn_outside(
                f"PEFT's form would leave out what is trained besides the adapters: {listed(left_out, 10)}. All "
                "weights are saved instead, for load_checkpoint(). Name those modules in modules_to_save of PEFT's "
                "config to save them with the adapters."
            )
        return not left_out
    # With adapters of its own, transformers would leave out the rest; what it has sharded, all processes must save.
    is_divided = getattr(getattr(model, "config", None), "distributed_config", None) or getattr(model, "_tp_size", None)
    return (
        _is_a(model, "transformers", "PreTrainedModel")
        and not getattr(model, "_hf_peft_config_loaded", False)
        and not is_divided
    )


def _is_a(model: nn.Module, package: str, kind: str) -> bool:
    """Whether a model is of a class of a package, which is not imported for this."""
    return package in sys.modules and isinstance(model, getattr(sys.modules[package], kind, ()))


def _trained_beside_adapters(model: nn.Module) -> list[str]:
    """Return the parameters that are trained, and modules that follow the data, which PEFT does not save."""
    saved = set(adapter_names(model).values())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Of prompts and of matrices that it prunes, PEFT saves what it computes from them.
    computed = re.compile(r"^prompt_encoder\.|\.lora_")
    following = [
        f"{name}.running_mean"
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]
    return [name for name in trained + following if name not in saved and not computed.search(name)]


def adapter_names(model: Any) -> dict[tuple[str, str], str]:
    """Return the names in a model of what PEFT saves unchanged, by the file below a directory and the name in it."""
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    own = {id(value): name for name, value in state.items()}
    names: dict[tuple[str, str], str] = {}
    for adapter in model.peft_config:
        file = ADAPTERS if adapter == "default" else f"{adapter}/{ADAPTERS}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # saving repeats these warnings
            saved = get_peft_model_state_dict(model, state, adapter)
        names |= {(file, name): own[id(value)] for name, value in saved.items() if id(value) in own}
    return names


def write_own_form(model: Any, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Save a model by its own ``save_pretrained``, in safetensors with checksums. Each file is written atomically.

    :param weights: the full state of the model
    """
    how: dict[str, Any] = {} if has_adapters(model) else {"max_shard_size": sys.maxsize}  # as a single file
    with tempfile.TemporaryDirectory(prefix=".pretrained.", dir=_made(directory)) as temporary:
        new = Path(temporary)
        with naming(directory):
            model.save_pretrained(temporary, state_dict=dict(weights), **how)
        for path in sorted(path for path in new.rglob("*") if path.is_file() and path.name != _CARD):
            target = directory / path.relative_to(new)
            with replacing(target) as replacement:
                if path.suffix == ".safetensors":
                    _, metadata = open_tensors(path)
                    write_tensors(safetensors.torch.load_file(path), replacement, {**metadata, **UNSEALED})
                    seal(replacement)
                else:
                    shutil.copyfile(path, replacement)


def _made(directory: Path) -> Path:
    with naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def remove_adapters(directory: Path) -> None:
    """Remove adapters that were saved before, where all weights of such a model are."""
    for name in (ADAPTERS, _ADAPTER_CONFIG):
        (directory / name).unlink(missing_ok=True)
