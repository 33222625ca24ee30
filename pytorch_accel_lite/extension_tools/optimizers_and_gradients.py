"""Optimizers, their rates and parameters, and the gradients of an update."""

from pytorch_accel_lite.distributed.gradient_sync import average_gradients, no_sync_within_window, sync_ddp_buffers
from pytorch_accel_lite.loop.guards.optimizer_checks import not_optimized
from pytorch_accel_lite.optimizers.optimizer_parts import (
    group_names,
    is_created,
    optimized_parameters,
    parts_of_optimizer,
    schedulers_in,
)
from pytorch_accel_lite.optimizers.optimizer_steps import needs_closure
from pytorch_accel_lite.optimizers.optimizer_types import CreateScheduler, TrainerOptimizer
from pytorch_accel_lite.optimizers.param_group_options import (
    Options,
    ParamGroup,
    format_rates,
    initial_options,
    layer_scales,
    scheduled_options,
    set_option,
)
from pytorch_accel_lite.run.accumulation import Count, as_weight
from pytorch_accel_lite.run.current_rates import current_rates, rates_change_in_each_update
from pytorch_accel_lite.run.trainer_parts.optimizer_modes import evaluating_optimizers, set_optimizer_modes
from pytorch_accel_lite.run.trainer_parts.parameters_of_optimizers import (
    all_optimized_parameters,
    parameters_not_in_model,
)
from pytorch_accel_lite.run.trainer_parts.trainer_attributes import (
    buffers_in,
    other_modules,
    other_optimizers,
    registered_objects,
)
from pytorch_accel_lite.steps.clipping import total_norm

__all__ = [
    "Count", "CreateScheduler", "Options", "ParamGroup", "TrainerOptimizer", "all_optimized_parameters", "as_weight",
    "average_gradients", "buffers_in", "current_rates", "evaluating_optimizers", "format_rates", "group_names",
    "initial_options", "is_created", "layer_scales", "needs_closure", "no_sync_within_window", "not_optimized",
    "optimized_parameters", "other_modules", "other_optimizers", "parameters_not_in_model", "parts_of_optimizer",
    "rates_change_in_each_update", "registered_objects", "scheduled_options", "schedulers_in", "set_option",
    "set_optimizer_modes", "sync_ddp_buffers", "total_norm",
]  # fmt: skip
