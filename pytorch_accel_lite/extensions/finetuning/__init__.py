"""Fine-tuning by layer groups: freezing them, and learning rates that fall with the distance from the head."""

from pytorch_accel_lite.extensions.finetuning.freezing import BN_MODULES, Layer, LayerGroup, ModelFreezer
from pytorch_accel_lite.extensions.finetuning.group_rates import layer_group_parameters, parameters_by_group
from pytorch_accel_lite.extensions.finetuning.layer_groups import ModuleGroup, find_blocks, find_groups

__all__ = [
    "BN_MODULES",
    "Layer",
    "LayerGroup",
    "ModelFreezer",
    "ModuleGroup",
    "find_blocks",
    "find_groups",
    "layer_group_parameters",
    "parameters_by_group",
]
