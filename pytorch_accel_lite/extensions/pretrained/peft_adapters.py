"""The form of PEFT's adapters, beside which a model's other weights are not saved."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pytorch_accel_lite.extending import ADAPTERS, ModelForm, TrainerLike, WriteModel, verify_tensors
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.states_and_files import LEFT_OUT, is_of_peft, without_compile
from pytorch_accel_lite.extension_tools.texts_and_pages import listed
from pytorch_accel_lite.extensions.pretrained.preprocessors import save_preprocessors

_CONFIG = "adapter_config.json"
_CARD = "README.md"  # PEFT's card, which that of save_model() replaces


class PeftForm(ModelForm):
    """The form of ``save_pretrained`` of PEFT: the adapters alone."""

    def writer_of(self, trainer: TrainerLike, model: nn.Module) -> WriteModel | None:
        """Return a function that writes the adapters; ``None``, with a warning, if more than these is trained."""
        if not is_of_peft(model):
            return None
        if beside := _trained_beside_adapters(model):
            warn_outside(
                f"PEFT's form would leave out what is trained besides the adapters: {listed(beside, 10)}. All "
                "weights are saved instead, for load_checkpoint(). Name those modules in modules_to_save of PEFT's "
                "config to save them with the adapters."
            )
            return None
        return partial(_save_adapters, trainer, model)

    def read(self, directory: Path, model: nn.Module) -> StateDict | None:
        """Return the adapters that PEFT or ``save_model()`` has saved.

        All other weights of the model count as left out, with unknown checksums.
        """
        if not (directory / ADAPTERS).is_file() or not is_of_peft(model):
            return None
        state = model.state_dict()
        own = dict(zip(state, without_compile(state), strict=True))
        names = {key: own[name] for key, name in _adapter_names(model).items()}
        weights = {}
        for file in sorted({file for file, _ in names}):
            if not (directory / file).is_file():
                raise FileNotFoundError(
                    f"{file} is missing in {os.fspath(directory)!r}, but {type(model).__name__} has that adapter."
                )
            verify_tensors(directory / file)
            for name, value in safetensors.torch.load_file(directory / file).items():
                weights[names.get((file, name), name)] = value
        return {"model_state_dict": weights, LEFT_OUT: dict.fromkeys(sorted({*own.values()} - {*names.values()}))}

    def clear(self, directory: Path, model: nn.Module) -> None:
        """Remove adapters, which ``read`` would prefer."""
        if is_of_peft(model):
            for name in (ADAPTERS, _CONFIG):
                (directory / name).unlink(missing_ok=True)


def _save_adapters(trainer: TrainerLike, model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    model.save_pretrained(folder, state_dict=dict(weights))
    (folder / _CARD).unlink(missing_ok=True)
    save_preprocessors(trainer, folder)


def _trained_beside_adapters(model: nn.Module) -> list[str]:
    """Return the trained parameters, and modules with statistics of the data, that PEFT does not save."""
    saved = set(_adapter_names(model).values())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Of prompts and pruned matrices, PEFT saves values that it computes from them.
    computed = re.compile(r"^prompt_encoder\.|\.lora_")
    following = [
        f"{name}.running_mean"
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]
    return [name for name in trained + following if name not in saved and not computed.search(name)]


def _adapter_names(model: Any) -> dict[tuple[str, str], str]:
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
