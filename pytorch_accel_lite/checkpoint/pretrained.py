"""Saving models of transformers, PEFT, diffusers and timm in the formats of these libraries."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pytorch_accel_lite.base.origins import warn_outside
from pytorch_accel_lite.base.reachable import reachable_from
from pytorch_accel_lite.base.text import listed
from pytorch_accel_lite.checkpoint.checksums import UNSEALED, seal
from pytorch_accel_lite.checkpoint.files import naming_file, open_tensors, replacing, write_tensors
from pytorch_accel_lite.run.state import TrainerLike

#: The file of PEFT's adapters in a directory.
ADAPTERS = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_CARD = "README.md"  # PEFT's card, which the package's own replaces
_CONFIG = "config.json"
_TIMM_WEIGHTS, _DIFFUSERS_WEIGHTS = "model.safetensors", "diffusion_pytorch_model.safetensors"

#: Writes a model, with the given full weights, into a folder.
Form = Callable[[Mapping[str, torch.Tensor], Path], None]


def is_of_peft(model: nn.Module) -> bool:
    """Whether a model is from PEFT."""
    return _is_a(model, "peft", "PeftModel")


def base_of(model: nn.Module) -> str:
    """Return the name of the pretrained model that a model began with, as its library knows it; empty if unknown."""
    configs = getattr(model, "peft_config", {}) if is_of_peft(model) else {}
    names = [getattr(config, "base_model_name_or_path", None) for config in configs.values()]
    names.append(getattr(getattr(model, "config", None), "_name_or_path", None))
    return next((name for name in names if isinstance(name, str) and name), "")


def own_form(model: nn.Module) -> Form | None:
    """Return a function that saves a model in its library's format. Warns if that format leaves out trained weights.

    Returns:
        ``None`` for other models, and for models that only their library itself can save
    """
    if is_of_peft(model):
        if beside := _trained_beside_adapters(model):
            warn_outside(
                f"PEFT's form would leave out what is trained besides the adapters: {listed(beside, 10)}. All "
                "weights are saved instead, for load_checkpoint(). Name those modules in modules_to_save of PEFT's "
                "config to save them with the adapters."
            )
        return None if beside else partial(_save_pretrained, model)
    # transformers saves only its own adapters. If it has sharded a model, all processes must save the model.
    is_divided = getattr(getattr(model, "config", None), "distributed_config", None) or getattr(model, "_tp_size", None)
    has_own_adapters = getattr(model, "_hf_peft_config_loaded", False)
    if _is_a(model, "transformers", "PreTrainedModel") and not has_own_adapters and not is_divided:
        return partial(_save_pretrained, model, max_shard_size=sys.maxsize)  # a single file
    if _is_a(model, "diffusers", "ModelMixin"):
        return partial(_save_diffusers, model)
    return partial(_save_timm, model) if is_of_timm(model) else None


def is_of_timm(model: nn.Module) -> bool:
    """Whether a model was made by ``timm.create_model``, rather than being a part of such a model."""
    return "timm" in sys.modules and isinstance(getattr(model, "pretrained_cfg", None), Mapping)


def _save_pretrained(model: Any, weights: Mapping[str, torch.Tensor], folder: Path, **how: Any) -> None:
    model.save_pretrained(folder, state_dict=dict(weights), **how)


def _save_diffusers(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    model.save_config(folder)
    write_tensors(weights, folder / _DIFFUSERS_WEIGHTS, {})


def _save_timm(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Save a timm model, without a configuration if timm cannot write one."""
    from timm.models._hub import save_config_for_hf

    write_tensors(weights, folder / _TIMM_WEIGHTS, {})
    try:
        save_config_for_hf(model, str(folder / _CONFIG))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # for example, an argument is not JSON
        (folder / _CONFIG).unlink(missing_ok=True)
        warn_outside(f"timm could not describe {type(model).__name__}, so there is no {_CONFIG}: {error}")


def _is_a(model: nn.Module, package: str, kind: str) -> bool:
    """Whether the class of a model is from a package. Does not import the package."""
    return package in sys.modules and isinstance(model, getattr(sys.modules[package], kind, ()))


def _trained_beside_adapters(model: nn.Module) -> list[str]:
    """Return the trained parameters, and modules with statistics of the data, that PEFT does not save."""
    saved = set(adapter_names(model).values())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Of prompts and pruned matrices, PEFT saves values that it computes from them.
    computed = re.compile(r"^prompt_encoder\.|\.lora_")
    following = [
        f"{name}.running_mean"
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]
    return [name for name in trained + following if name not in saved and not computed.search(name)]


def adapter_names(model: Any) -> dict[tuple[str, str], str]:
    """Return the names in a model of the tensors that PEFT saves unchanged, by file and name in the file."""
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


def write_own_form(
    form: Form, weights: Mapping[str, torch.Tensor], directory: Path, preprocessors: Iterator[Any]
) -> None:
    """Save a model in its library's format, as safetensors with checksums. Each file is written atomically.

    Args:
        weights: the full state of the model
        preprocessors: tokenizers and other preprocessors to save with the model
    """
    with tempfile.TemporaryDirectory(prefix=".pretrained.", dir=_made(directory)) as temporary:
        new = Path(temporary)
        with naming_file(directory):
            form(weights, new)
            for preprocessor in preprocessors:
                preprocessor.save_pretrained(new)
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
    with naming_file(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def remove_adapters(directory: Path) -> None:
    """Remove adapters that were saved earlier from a directory that now has all weights of the model."""
    for name in (ADAPTERS, _ADAPTER_CONFIG):
        (directory / name).unlink(missing_ok=True)


#: Preprocessors of a model's inputs, by their base class in transformers. A processor contains other preprocessors.
_PREPROCESSORS = {
    "ProcessorMixin": "processor",
    "PreTrainedTokenizerBase": "tokenizer",
    "ImageProcessingMixin": "image processor",
    "FeatureExtractionMixin": "feature extractor",
}


def preprocessors_of(trainer: TrainerLike, model: nn.Module) -> Iterator[Any]:
    """Yield the tokenizer, processor or other preprocessors with which a model of transformers was trained.

    Searches attributes of the trainer, then the function that collates its batches, then its datasets. If several
    preprocessors of a kind are equally near, none is chosen, with a warning.
    """
    if not (is_of_peft(model) or _is_a(model, "transformers", "PreTrainedModel")):
        return
    data = trainer.current_run.data
    places = [[*vars(trainer).values()], reachable_from([data.collate_fn])]
    places.append(reachable_from([data.train_dataset, data.eval_dataset]))
    kinds_left = dict.fromkeys(_PREPROCESSORS.values())
    for place in places:
        found = {id(item): item for item in place if _kind_of_preprocessor(item) in kinds_left}
        for processor in [item for item in found.values() if _kind_of_preprocessor(item) == "processor"]:
            for part in vars(processor).values():
                found.pop(id(part), None)
        for kind in [*kinds_left]:
            of_kind = [item for item in found.values() if _kind_of_preprocessor(item) == kind]
            if of_kind:
                del kinds_left[kind]
            if len(of_kind) == 1:
                yield of_kind[0]
            elif of_kind:
                warn_outside(
                    f"{len(of_kind)} {kind}s were used for training, so none is saved with the model. Set "
                    f"trainer.{kind.replace(' ', '_')} to the one that belongs to it."
                )


def _kind_of_preprocessor(item: object) -> str | None:
    for base in type(item).__mro__:
        if base.__name__ in _PREPROCESSORS and base.__module__.startswith("transformers."):
            return _PREPROCESSORS[base.__name__]
    return None
