"""A small model with layer groups, and what is trained of a model."""

from __future__ import annotations

import torch
from torch import nn

from pytorch_accel_lite.finetuning import layer_group_parameters


def model_to_unfreeze() -> nn.Module:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    torch.set_rng_state(state)
    return model.double()


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def in_groups(model: nn.Module) -> list[set[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [{names[p] for p in group["params"]} for group in layer_group_parameters(model, lr=1.0)]
