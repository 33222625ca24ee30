"""Public path of freezing and of groups of layers."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.base.modules import stay_in_eval, stays_in_eval
from pytorch_accel_lite.extensions.finetuning import BN_MODULES as BN_MODULES
from pytorch_accel_lite.extensions.finetuning import (
    Layer,
    LayerGroup,
    ModelFreezer,
    find_blocks,
    layer_group_parameters,
    parameters_by_group,
)

__all__ = [
    "Layer",
    "LayerGroup",
    "ModelFreezer",
    "find_blocks",
    "layer_group_parameters",
    "parameters_by_group",
    "stays_in_eval",
]

_stay_in_eval = stay_in_eval  # models with frozen layers that version 0.2 pickled have it by this name

add_missing_name_errors(__name__)
