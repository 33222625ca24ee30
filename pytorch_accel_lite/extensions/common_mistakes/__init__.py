"""Warnings about mistakes in programs that run: names of events and methods, what is trained, and what has no effect.

Nothing changes how a run trains.
"""

from pytorch_accel_lite.extending import RUN_CHECKS
from pytorch_accel_lite.extensions.common_mistakes.first_batch import warn_of_loss
from pytorch_accel_lite.extensions.common_mistakes.misspelt_names import (
    warn_of_misspelt_methods,
    warn_of_unknown_events,
)
from pytorch_accel_lite.extensions.common_mistakes.without_effect import (
    check_rates,
    warn_of_assignments,
    warn_of_untrained_parameters,
)

RUN_CHECKS.of_user_code.append(warn_of_unknown_events)
RUN_CHECKS.of_user_code.append(warn_of_misspelt_methods)
RUN_CHECKS.of_optimizer.append(warn_of_untrained_parameters)
RUN_CHECKS.of_schedule.append(check_rates)
RUN_CHECKS.before_training.append(warn_of_assignments)
RUN_CHECKS.of_first_batch.append(warn_of_loss)
