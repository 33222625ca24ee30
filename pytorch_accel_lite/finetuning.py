"""Public path of freezing and of groups of layers."""

from pytorch_accel_lite.optimizers.freezing import BN_MODULES as BN_MODULES
from pytorch_accel_lite.optimizers.freezing import (
    Layer,
    LayerGroup,
    ModelFreezer,
    layer_group_parameters,
    parameters_by_group,
    stays_in_eval,
)
from pytorch_accel_lite.optimizers.layer_groups import find_blocks

__all__ = [
    "Layer",
    "LayerGroup",
    "ModelFreezer",
    "find_blocks",
    "layer_group_parameters",
    "parameters_by_group",
    "stays_in_eval",
]
