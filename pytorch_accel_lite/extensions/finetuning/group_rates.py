"""Smaller learning rates for the layers of a pretrained model that are far from its head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_module, check_range
from pytorch_accel_lite.extension_tools.modules_and_devices import unwrap
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import ParamGroup
from pytorch_accel_lite.extensions.finetuning.layer_groups import ModuleGroup, find_groups, has_adapters


def parameters_by_group(model: nn.Module, groups: Sequence[ModuleGroup] | None = None) -> list[list[nn.Parameter]]:
    """Return the parameters of each layer group that has parameters. Each parameter occurs once.

    Args:
        groups: the groups, as in ``ModelFreezer``
    """
    model = unwrap(check_module("model", model), keep_torch_compile=False)
    grouped = [group.parameters for group in find_groups(model, groups) if group.parameters]
    return grouped or [list(model.parameters())]


def layer_group_parameters(
    model: nn.Module, lr: float, decay: float = 1 / 2.6, *, groups: Sequence[ModuleGroup] | None = None
) -> list[ParamGroup]:
    """Return the parameter groups of an optimizer with smaller learning rates for layer groups far from the head.

    This is discriminative fine-tuning, from Howard and Ruder, "Universal Language Model Fine-tuning for Text
    Classification" (2018, arXiv:1801.06146), who divide the rate by 2.6 from group to group. Layer groups are those of
    ``ModelFreezer`` that have parameters. Pass the result to the optimizer: ``AdamW(layer_group_parameters(...))``.
    Frozen parameters are included, because they may be unfrozen later, except for the base weights of a model with
    adapters.

    Args:
        model: the model
        lr: learning rate of the last group, the head
        decay: ratio of the learning rate of each group to the rate of the next group towards the head
        groups: the layer groups, see ``ModelFreezer``
    """
    check_range("lr", lr, above=0)
    check_range("decay", decay, above=0)
    grouped = parameters_by_group(model, groups)
    rates = [lr * decay**distance for distance in reversed(range(len(grouped)))]
    if has_adapters(unwrap(model, keep_torch_compile=False)):
        grouped = [[parameter for parameter in group if parameter.requires_grad] for group in grouped]
    return [{"params": group, "lr": rate} for group, rate in zip(grouped, rates, strict=True) if group]
