"""Freezing layers of a pretrained model."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_bool, check_module, check_number
from pytorch_accel_lite.extension_tools.modules_and_devices import keep_in_eval, release_from_eval, unwrap
from pytorch_accel_lite.extensions.finetuning.layer_groups import Group, ModuleGroup, find_groups, has_adapters

#: The modules affected by ``freeze_batch_norms``.
BN_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _PartOfModel(NamedTuple):
    layer_group_idx: tuple[int, int]
    module: nn.Module
    is_frozen: bool


class LayerGroup(_PartOfModel):
    """Layers that are frozen and unfrozen together.

    Args:
        layer_group_idx: the index of the group, counted from the first group and from the last
        module: the module of the group, or a ``ModuleList`` of several modules
        is_frozen: whether the group has parameters that can be frozen, and all of them are frozen
    """


class Layer(_PartOfModel):
    """A module without submodules, with the ``layer_group_idx`` of its ``LayerGroup``."""


class ModelFreezer:
    """Freezes and unfreezes the layer groups of a model. Print it to see the groups.

    If most layers of the model are in lists of blocks of one class, as in a transformer, the groups are the modules
    before the blocks (embeddings), each block with the modules that follow it (a norm, a pooler), and the head: the
    model's children after the child with the last block. Lists of stages count as blocks, inner lists do not. Groups
    without parameters are left out. In all other models, each module that is an attribute of the model is a group.

    Parameters owned by a module around several groups, such as a class token, belong to the first group; a parameter
    shared by several groups belongs to the first of them. Freeze before the run starts. In the middle of a run on
    several processes, call ``trainer.rewrap_model()`` afterwards.

    Args:
        model: the model
        freeze_batch_norms: whether to freeze batch norms, too; otherwise batch norms are trained even in frozen groups
        groups: the groups from the input to the head, each a module of the model or a list of modules; for example
            ``list(model.children())``

    Raises:
        ValueError: if a module in ``groups`` is not in the model or is in two groups, or if the model is PEFT's, whose
            base weights stay frozen
    """

    def __init__(
        self, model: nn.Module, freeze_batch_norms: bool = False, *, groups: Sequence[ModuleGroup] | None = None
    ) -> None:
        self.model = unwrap(check_module("model", model), keep_torch_compile=False)
        if has_adapters(self.model):
            raise ValueError(
                "ModelFreezer and GradualUnfreezingCallback would unfreeze the base weights of "
                f"{type(self.model).__name__}, which has adapters. Choose the layers that get adapters with "
                "layers_to_transform in PEFT's config."
            )
        self.freeze_batch_norms = check_bool("freeze_batch_norms", freeze_batch_norms)
        self._passed_groups = groups
        find_groups(self.model, groups)  # raises an error if groups are invalid

    def __repr__(self) -> str:
        names = {module: name for name, module in self.model.named_modules()}
        lines = [f"ModelFreezer of {type(self.model).__name__}: group, parameters, modules"]
        for index, group, parameters in self._groups():
            size = sum(parameter.numel() for parameter in group.parameters)
            modules = ", ".join(names[module] for module in group.modules)
            lines.append(f"  {index:>2}  {size:>13,}  {modules}{' (frozen)' if _is_frozen(parameters) else ''}")
        return "\n".join(lines)

    def get_layer_groups(self) -> list[LayerGroup]:
        """Return the layer groups, from the input to the head."""
        groups = self._groups()
        return [LayerGroup((i, i - len(groups)), group.module, _is_frozen(owned)) for i, group, owned in groups]

    def get_layers(self) -> list[Layer]:
        """Return the modules without submodules, in the order of the groups."""
        return [
            Layer(group.layer_group_idx, module, _is_frozen(list(module.parameters())))
            for group in self.get_layer_groups()
            for module in group.module.modules()
            if next(module.children(), None) is None
        ]

    def get_trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are not frozen."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def freeze(self, from_index: int = 0, to_index: int = -2, set_modules_as_eval: bool = False) -> None:
        """Freeze the layer groups between two indices, inclusive and in any order; by default all groups but the last.

        Args:
            from_index: one end of the range; negative indices count from the last group
            to_index: the other end of the range
            set_modules_as_eval: whether to keep frozen modules in evaluation mode even if the model is set to training
                mode: without dropout, and with fixed statistics of frozen batch norms

        Raises:
            IndexError: if there is no such group
        """
        for _, group, parameters in self._between(from_index, to_index):
            for parameter in parameters:
                parameter.requires_grad = False
                parameter.grad = None  # otherwise an optimizer would keep using the gradient
            for module in group.module.modules() if set_modules_as_eval else ():
                if not self._is_exempt(module):
                    keep_in_eval(module)

    def unfreeze(
        self, from_index: int = -1, to_index: int = 0, set_modules_as_training: bool = True
    ) -> dict[int, dict[str, list[nn.Parameter]]]:
        """Unfreeze the layer groups between two indices, as in ``freeze()``; by default all groups.

        Args:
            set_modules_as_training: whether to set the modules to training mode

        Returns:
            the unfrozen parameters by group index, as ``{"params": [...]}`` for ``optimizer.add_param_group``
        """
        unfrozen = {}
        for index, group, parameters in self._between(from_index, to_index):
            frozen = [parameter for parameter in parameters if not parameter.requires_grad]
            for parameter in frozen:
                parameter.requires_grad = True
            if frozen:
                unfrozen[index] = {"params": frozen}
            for module in group.module.modules():
                release_from_eval(module)
            if set_modules_as_training:
                group.module.train()
        return unfrozen

    def _between(self, from_index: int, to_index: int) -> list[tuple[int, Group, list[nn.Parameter]]]:
        groups = self._groups()
        if not groups:
            raise ValueError(
                f"{type(self.model).__name__} has no layer groups, as none of its attributes is a module. Set "
                "requires_grad of its parameters yourself."
            )
        ends = []
        for name, index in (("from_index", from_index), ("to_index", to_index)):
            check_number(name, index, numbers.Integral, "the index of a layer group, see print(freezer)")
            if not -len(groups) <= index < len(groups):
                raise IndexError(
                    f"{name}={index} is not a layer group: {type(self.model).__name__} has {len(groups)}, from 0 to "
                    f"{len(groups) - 1} or from {-len(groups)} to -1."
                )
            ends.append(index % len(groups))
        return groups[min(ends) : max(ends) + 1]

    def _is_exempt(self, module: nn.Module) -> bool:
        return isinstance(module, BN_MODULES) and not self.freeze_batch_norms

    def _groups(self) -> list[tuple[int, Group, list[nn.Parameter]]]:
        """Return the layer groups, each with its index and the parameters that can be frozen."""
        spared = {p for module in self.model.modules() if self._is_exempt(module) for p in module.parameters()}
        return [
            (index, group, [p for p in group.parameters if p not in spared])
            for index, group in enumerate(find_groups(self.model, self._passed_groups))
        ]


def _is_frozen(parameters: list[nn.Parameter]) -> bool:
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
