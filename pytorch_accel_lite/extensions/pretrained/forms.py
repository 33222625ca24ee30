"""The forms of models of transformers, diffusers and timm."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite.extending import ModelForm, TrainerLike, WriteModel, write_tensors
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.states_and_files import is_of_peft, is_of_timm
from pytorch_accel_lite.extensions.pretrained.preprocessors import save_preprocessors

_CONFIG = "config.json"
_TIMM_WEIGHTS, _DIFFUSERS_WEIGHTS = "model.safetensors", "diffusion_pytorch_model.safetensors"


class TransformersForm(ModelForm):
    """The form of ``save_pretrained`` of transformers, with the tokenizer of the training."""

    def writer_of(self, trainer: TrainerLike, model: nn.Module) -> WriteModel | None:
        """Return a function that writes the model and its tokenizer.

        ``None`` also for models to which transformers has added adapters, as it would save these alone, and for models
        that it has sharded, which all processes must save.
        """
        config = getattr(model, "config", None)
        is_sharded = getattr(config, "distributed_config", None) or getattr(model, "_tp_size", None)
        has_own_adapters = getattr(model, "_hf_peft_config_loaded", False)
        is_whole = _is_a(model, "transformers", "PreTrainedModel") and not has_own_adapters and not is_sharded
        return partial(_save_pretrained, trainer, model) if is_whole else None


def _save_pretrained(trainer: TrainerLike, model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    model.save_pretrained(folder, state_dict=dict(weights), max_shard_size=sys.maxsize)  # a single file
    save_preprocessors(trainer, folder)


class DiffusersForm(ModelForm):
    """The form of ``save_pretrained`` of diffusers."""

    def writer_of(self, trainer: TrainerLike, model: nn.Module) -> WriteModel | None:
        """Return a function that writes the configuration and the weights."""
        return partial(_save_diffusers, model) if _is_a(model, "diffusers", "ModelMixin") else None


def _save_diffusers(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    model.save_config(folder)
    write_tensors(weights, folder / _DIFFUSERS_WEIGHTS, {})


class TimmForm(ModelForm):
    """The form in which timm has models on the Hugging Face Hub."""

    def writer_of(self, trainer: TrainerLike, model: nn.Module) -> WriteModel | None:
        """Return a function that writes the weights, and the configuration unless timm cannot write one.

        A model of PEFT has the attributes of the model in it, but not its form.
        """
        return partial(_save_timm, model) if is_of_timm(model) and not is_of_peft(model) else None


def _save_timm(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
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
